/* A plugin of qemu's user emulation (TCG plugin API, version 1, qemu 6.0 and later): counts the instructions that an executable runs in
 * generated kernels, which are functions named rc_matmul*, rc_attention* and rc_loops*, and in the parts that they call, rc_rows* (of
 * matmuls) and rc_pairs* (of attention).
 *
 * In: -plugin LIBRARY. Out: one line per kind on the emulator's log, "count matmul 123". Exact for one thread.
 * qemu's own header (include/qemu/qemu-plugin.h) is not packaged; these are the parts of it that are used here. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
typedef struct qemu_info qemu_info_t;
enum { QEMU_PLUGIN_INLINE_ADD_U64 };
typedef void (*tb_callback)(qemu_plugin_id_t, struct qemu_plugin_tb *);
typedef void (*exit_callback)(qemu_plugin_id_t, void *);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, tb_callback);
void qemu_plugin_register_vcpu_insn_exec_inline(struct qemu_plugin_insn *, int, void *, uint64_t);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t, exit_callback, void *);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
const char *qemu_plugin_insn_symbol(const struct qemu_plugin_insn *);
void qemu_plugin_outs(const char *);

#define EXPORT __attribute__((visibility("default")))
EXPORT int qemu_plugin_version = 1;

static const char *const KINDS[] = {"matmul", "attention", "loops"};
enum { COUNT = sizeof KINDS / sizeof *KINDS };
static uint64_t counts[COUNT];

static const struct {
  const char *symbol;
  size_t kind;
} PREFIXES[] = {{"rc_matmul", 0}, {"rc_rows", 0}, {"rc_attention", 1}, {"rc_pairs", 1}, {"rc_loops", 2}};

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb) {
  (void)id;
  for (size_t i = 0; i < qemu_plugin_tb_n_insns(tb); i++) {
    struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
    const char *symbol = qemu_plugin_insn_symbol(insn);
    for (size_t p = 0; symbol && p < sizeof PREFIXES / sizeof *PREFIXES; p++) {
      if (!strncmp(symbol, PREFIXES[p].symbol, strlen(PREFIXES[p].symbol)))
        qemu_plugin_register_vcpu_insn_exec_inline(insn, QEMU_PLUGIN_INLINE_ADD_U64, &counts[PREFIXES[p].kind], 1);
    }
  }
}

static void finished(qemu_plugin_id_t id, void *data) {
  (void)id, (void)data;
  for (size_t kind = 0; kind < COUNT; kind++) {
    char line[64];
    snprintf(line, sizeof line, "count %s %llu\n", KINDS[kind], (unsigned long long)counts[kind]);
    qemu_plugin_outs(line);
  }
}

EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc, char **argv) {
  (void)info, (void)argc, (void)argv;
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_atexit_cb(id, finished, NULL);
  return 0;
}
