// Runs a kernel that was linked into this program on memory that a file holds: a header of 64-bit words, then the context and the areas that
// its pointers are to, each on a page of its own.
//
//   words: number of areas, threads from, to, of all, layer, place of the context, then (offset in the context, place) of each area
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

void kernel(const void *ctx, uint32_t thread, uint32_t threads, uint32_t layer);

int main(int count, char **words) {
    int file = open(words[1], O_RDWR);
    struct stat status;
    if (count != 2 || file < 0 || fstat(file, &status)) return 2;
    char *memory = mmap(0, status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) return 3;
    const uint64_t *head = (const uint64_t *)memory;
    char *ctx = memory + head[5];
    for (uint64_t i = 0; i < head[0]; i++) {
        char *area = memory + head[7 + 2 * i];
        memcpy(ctx + head[6 + 2 * i], &area, sizeof area);
    }
    for (uint64_t thread = head[1]; thread < head[2]; thread++) kernel(ctx, thread, head[3], head[4]);
    return 0;
}
