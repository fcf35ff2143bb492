/* What an executable does first: can this CPU run it at all, is its file whole, and is what is loaded what was built?
 *
 *   rc_start (the entry point) -> rc_check -> _start of the C library, or a message and exit 9 (10 for the CPU)
 *
 * 0. On x86-64 the runtime is compiled for the level x86-64-v2. What the kernels need beyond it the runtime checks itself.
 * 1. The file is as long as its program headers say; a page behind its end would be SIGBUS.
 * 2. Headers and payload apart, what is loaded has the checksum that the payload's header says: XXH64 of each segment's bytes
 *    in the file, in the order of the program headers, seeded with that of the one before (0 for the first).
 *
 * The C library has relocated and initialised nothing yet, so that damage to code, constants, variables or tables of addresses
 * is noticed before any of them is used, and variables are still what the file says. For the same reason nothing here may need
 * a relocation, a library or thread-local storage: system calls are made directly, words and names lie beside the code, and the link
 * stage compiles it with -ffreestanding -fno-stack-protector. The linker script puts it behind the headers, in the second page
 * of the file (of 4 or 64 KB), where few cuts reach.
 *
 * On the command line: CHECKSUM_AT, the offset of `image_checksum` in the payload's header (runtime-lib/src/abi.rs).
 */

#include <elf.h>
#include <fcntl.h>
#include <sys/syscall.h>

typedef unsigned long word;
typedef word __attribute__((aligned(1), may_alias)) unaligned_word;
typedef unsigned __attribute__((aligned(1), may_alias)) unaligned_half;

#define CODE __attribute__((section(".rc_start.code")))
#define TEXT(name, text) static const char name[] __attribute__((section(".rc_start.text"))) = text
#define LINKER __attribute__((visibility("hidden")))

extern const char __ehdr_start[] LINKER;
extern const unsigned char rc_payload[] LINKER;

TEXT(EXECUTABLE, "/proc/self/exe");
TEXT(NAMELESS, "executable");
TEXT(ERROR, "error[E9-executable]: ");
TEXT(STRANGE, "?");
TEXT(TRUNCATED, ": truncated, expected ");
TEXT(FOUND, " bytes, found ");
TEXT(FEWER, " bytes, found fewer\n");
TEXT(NEWLINE, "\n");
TEXT(DIFFERS, ": code, constants or variables: hash differs\n");
TEXT(HELP, "help: the file was changed after it was built: copy or build it again\n");
#if defined(__x86_64__)
TEXT(OLD_CPU, "error[E10-cpu]: needs x86-64-v2 and avx2; missing x86-64-v2\nhelp: no model runs on an x86-64 CPU without AVX2\n");
#endif

#if defined(__x86_64__)
__asm__(".pushsection .rc_start.code, \"ax\", @progbits\n"
        ".globl rc_start\n"
        "rc_start:\n"
        "    mov %rsp, %rdi\n"
        "    call rc_check\n"
        "    xor %edx, %edx\n" /* as the kernel left it: nothing to call at exit */
        "    jmp _start\n"
        ".popsection\n");

static inline __attribute__((always_inline)) long call(long number, long a, long b, long c)
{
    __asm__ volatile("syscall" : "+a"(number) : "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return number;
}
#elif defined(__aarch64__)
__asm__(".pushsection .rc_start.code, \"ax\", %progbits\n"
        ".globl rc_start\n"
        "rc_start:\n"
        "    mov x0, sp\n"
        "    bl rc_check\n"
        "    mov x0, #0\n"
        "    b _start\n"
        ".popsection\n");

static inline __attribute__((always_inline)) long call(long number, long a, long b, long c)
{
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
    return x0;
}
#else
#error "no entry point for this architecture"
#endif

CODE static void say(const char *text, word len)
{
    call(SYS_write, 2, (long)text, (long)len);
}
#define SAY(text) say(text, sizeof text - 1)

CODE static void say_number(word number)
{
    char digits[20];
    word at = sizeof digits;
    do {
        digits[--at] = (char)('0' + number % 10);
        number /= 10;
    } while (number);
    say(digits + at, sizeof digits - at);
}

/* Bytes of the character at `text`; 0 where it would control a terminal (C0, DEL, C1) or is no UTF-8. */
CODE static word printable(const unsigned char *text)
{
    const unsigned char first = text[0], second = first ? text[1] : 0;
    if (first < 0x80) {
        return first >= ' ' && first != 0x7f;
    }
    const word len = first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
    for (word at = 1; at < len; at++) {
        if ((text[at] & 0xc0) != 0x80) {
            return 0;
        }
    }
    /* C1 controls, and what is spelled longer than need be. */
    const unsigned least = first == 0xc2 || first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0;
    return second < least ? 0 : len;
}

/* The last part of a path, nothing in it that would control a terminal. */
CODE static void say_name(const char *path)
{
    const char *name = path;
    for (const char *at = path; *at; at++) {
        if (*at == '/') {
            name = at + 1;
        }
    }
    while (*name) {
        const word len = printable((const unsigned char *)name);
        say(len ? name : STRANGE, len ? len : 1);
        name += len ? len : 1;
    }
}

CODE static void __attribute__((noreturn)) leave(long code)
{
    for (;;) {
        call(SYS_exit_group, code, 0, 0);
    }
}

#if defined(__x86_64__)
/* Has the CPU what x86-64-v2 has more than the first: SSE3, SSSE3, CMPXCHG16B, SSE4.1, SSE4.2, POPCNT? */
CODE static int is_v2(void)
{
    const unsigned wanted = 1u << 0 | 1u << 9 | 1u << 13 | 1u << 19 | 1u << 20 | 1u << 23;
    unsigned a = 1, b, c = 0, d;
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return (c & wanted) == wanted;
}
#endif

/* Length of a file, or a negative number. */
CODE static long length(const char *path)
{
    long file = call(SYS_openat, AT_FDCWD, (long)path, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        return -1;
    }
    long len = call(SYS_lseek, file, 0, 2 /* SEEK_END */);
    call(SYS_close, file, 0, 0);
    return len;
}

/* Asks the kernel to read a byte: an error where touching it would be SIGBUS. Without a pipe the answer is yes. */
CODE static int is_there(word at)
{
    int ends[2];
    if (call(SYS_pipe2, (long)ends, O_CLOEXEC, 0) < 0) {
        return 1;
    }
    long written = call(SYS_write, ends[1], (long)at, 1);
    call(SYS_close, ends[0], 0, 0);
    call(SYS_close, ends[1], 0, 0);
    return written == 1;
}

#define P1 0x9E3779B185EBCA87ul
#define P2 0xC2B2AE3D27D4EB4Ful
#define P3 0x165667B19E3779F9ul
#define P4 0x85EBCA77C2B2AE63ul
#define P5 0x27D4EB2F165667C5ul

static inline __attribute__((always_inline)) word rotate(word x, int bits)
{
    return x << bits | x >> (64 - bits);
}

static inline __attribute__((always_inline)) word mix(word lane, word input)
{
    return rotate(lane + input * P2, 31) * P1;
}

/* XXH64 (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md), little endian. */
CODE static word xxh64(word at, word end, word seed)
{
    word hash = seed + P5;
    const word len = end - at;
    if (len >= 32) {
        word a = seed + P1 + P2, b = seed + P2, c = seed, d = seed - P1;
        for (; end - at >= 32; at += 32) {
            const unaligned_word *words = (const unaligned_word *)at;
            a = mix(a, words[0]);
            b = mix(b, words[1]);
            c = mix(c, words[2]);
            d = mix(d, words[3]);
        }
        hash = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
        hash = (hash ^ mix(0, a)) * P1 + P4;
        hash = (hash ^ mix(0, b)) * P1 + P4;
        hash = (hash ^ mix(0, c)) * P1 + P4;
        hash = (hash ^ mix(0, d)) * P1 + P4;
    }
    hash += len;
    for (; end - at >= 8; at += 8) {
        hash = rotate(hash ^ mix(0, *(const unaligned_word *)at), 27) * P1 + P4;
    }
    if (end - at >= 4) {
        hash = rotate(hash ^ *(const unaligned_half *)at * P1, 23) * P2 + P3;
        at += 4;
    }
    for (; at < end; at++) {
        hash = rotate(hash ^ *(const unsigned char *)at * P5, 11) * P1;
    }
    hash = (hash ^ hash >> 33) * P2;
    hash = (hash ^ hash >> 29) * P3;
    return hash ^ hash >> 32;
}

/* `stack` is as the kernel hands it over: argc, arguments, 0, environment, 0, auxiliary vector. */
CODE __attribute__((used)) void rc_check(const word *stack)
{
#if defined(__x86_64__)
    if (!is_v2()) {
        SAY(OLD_CPU);
        leave(10);
    }
#endif
    const word *aux = stack + 1 + stack[0] + 1;
    while (*aux++) {
    }
    const char *path = NAMELESS;
    for (; aux[0] != AT_NULL; aux += 2) {
        if (aux[0] == AT_EXECFN) {
            path = (const char *)aux[1];
        }
    }

    const word base = (word)__ehdr_start, payload = (word)rc_payload;
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)base;
    const Elf64_Phdr *segments = (const Elf64_Phdr *)(base + header->e_phoff), *segments_end = segments + header->e_phnum;
    word needed = 0, last = base;
    for (const Elf64_Phdr *s = segments; s < segments_end; s++) {
        if (s->p_type == PT_LOAD && s->p_filesz && s->p_offset + s->p_filesz > needed) {
            needed = s->p_offset + s->p_filesz;
            last = base + s->p_vaddr + s->p_filesz - 1;
        }
    }
    long found = length(EXECUTABLE);
    if (found < 0) {
        found = length(path);
    }
    if (found < 0 ? !is_there(last) : (word)found < needed) {
        SAY(ERROR);
        say_name(path);
        SAY(TRUNCATED);
        say_number(needed);
        if (found < 0) {
            SAY(FEWER);
        } else {
            SAY(FOUND);
            say_number((word)found);
            SAY(NEWLINE);
        }
        SAY(HELP);
        leave(9);
    }

    word hash = 0;
    for (const Elf64_Phdr *s = segments; s < segments_end; s++) {
        const word begin = base + s->p_vaddr, end = begin + s->p_filesz;
        if (s->p_type != PT_LOAD || begin == payload) {
            continue;
        }
        /* Behind the headers, in which `strip` changes offsets. */
        const word at = begin < (word)segments_end ? (word)segments_end : begin;
        hash = xxh64(at < end ? at : end, end, hash);
    }
    if (hash != *(const word *)(payload + CHECKSUM_AT)) {
        SAY(ERROR);
        say_name(path);
        SAY(DIFFERS);
        SAY(HELP);
        leave(9);
    }
}
