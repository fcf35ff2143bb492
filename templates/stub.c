/* Entry of an executable. The link stage fills in two places and compiles this file with the C compiler:
 *
 *   @DECLARATIONS@   one line per generated step:  extern void rc_step_step_8(const void *, unsigned, unsigned);
 *   @TABLE@          one line per generated step:  { 8, 0, rc_step_step_8 },
 *                    = { bucket, index into the manifest's entries, function }; the end mark is below; probes,
 *                    which measure the CPU, have entry 0xffffffff and the probe's number
 *
 * Everything else is the runtime's: `rc_main` gets the payload (section .rc_payload, which the link stage fills after
 * linking) and the table. The struct is `StepEntry` of runtime-lib/src/abi.rs.
 */

#include <features.h>

#ifndef __GLIBC_PREREQ
#error "a static executable needs glibc"
#elif !__GLIBC_PREREQ(2, 36)
#error "a static executable needs glibc 2.36 or later, whose start reads packed relocations"
#endif

@DECLARATIONS@

struct rc_step_entry {
    unsigned bucket;
    unsigned entry;
    void (*run)(const void *ctx, unsigned thread, unsigned threads);
};

const struct rc_step_entry rc_steps[] = {
@TABLE@
    { 0, 0, 0 },
};

extern int rc_main(int argc, char **argv, const void *payload, const struct rc_step_entry *steps);

/* First byte of the payload, placed at PAYLOAD_VADDR; the rest is appended to the file. */
__attribute__((section(".rc_payload"), aligned(4096), used)) const unsigned char rc_payload[1] = { 0 };

int main(int argc, char **argv)
{
    return rc_main(argc, argv, rc_payload, rc_steps);
}
