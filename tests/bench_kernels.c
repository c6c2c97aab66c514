// bench_kernels - how much of the machine each CPU kernel reaches: GEMM and attention as a share of
// the FMA peak, row and flat kernels as a share of copy bandwidth, both measured beside it in this
// process.
//
//     bench_kernels [--json] [--cpu-time] [--threads N,N,..] [--only WORD]
//
// Every figure is paired: peak (or copy) and kernel alternate. "best" is the best rate over the
// best peak of the run, "median" the median of the pairs' quotients (no use while others take the
// cores: a peak that was interrupted makes its pair look good). Traffic counts bytes that must move
// once.
#include "ops/kernels/kernels.h"
#include "ops/kernels/threads.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { REPEATS = 15, FLAT = 64 << 20 }; // pairs a figure; elements of a 256 MB array

static bool by_cpu_time;

// Seconds; with --cpu-time those that the process computed, shared out among its threads: what is
// left to go by while others use the cores.
static double now(void) {
  struct timespec t;
  clock_gettime(by_cpu_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  double seconds = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
  return by_cpu_time ? seconds / threads_count() : seconds;
}

// On huge pages, as large tensors are (core/memory.c).
static float *array(int64_t n) {
  const size_t page = (size_t)2 << 20;
  size_t bytes = ((size_t)n * 4 + page - 1) / page * page;
  float *x = aligned_alloc(page, bytes);
  if (!x) exit(1);
  madvise(x, bytes, MADV_HUGEPAGE);
  for (int64_t i = 0; i < n; i++) x[i] = (float)((i * 2654435761u) % 2000) * 1e-3f - 1;
  return x;
}

// ---- the machine
// ----------------------------------------------------------------------------------

typedef struct Probe {
  const CpuKernels *k;
  double operations; // of one item
} Probe;

static void probe_items(void *context, int64_t begin, int64_t end) {
  Probe *probe = context;
  for (; begin < end; begin++) probe->operations = probe->k->multiply_adds(50000);
}

// Operations a second.
static double peak(const CpuKernels *k) {
  Probe probe = {k, 0};
  double start = now();
  parallel_for(threads_count(), 1, probe_items, &probe);
  return probe.operations * threads_count() / (now() - start);
}

static float *big[4];

static void copy_block(void *context, int64_t begin, int64_t end) {
  (void)context;
  memcpy(big[1] + begin, big[0] + begin, (size_t)(end - begin) * 4);
}

// Bytes read and written a second.
static double copy(void) {
  double start = now();
  parallel_for(FLAT, 1 << 16, copy_block, NULL);
  return 8.0 * FLAT / (now() - start);
}

// ---- what is measured
// -----------------------------------------------------------------------------

typedef struct Figure {
  char name[64];
  double amount; // operations or bytes
  bool is_bytes;
  void (*run)(const CpuKernels *k, void *context);
  void *context;
} Figure;

static bool as_json;
static const char *only;

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void measure(const CpuKernels *k, const Figure *f) {
  if (only && !strstr(f->name, only)) return;
  double share[REPEATS], rate[REPEATS], best_unit = 0;
  f->run(k, f->context);
  int repeats = f->amount > 5e9 && !f->is_bytes ? 5 : f->is_bytes ? 7 : REPEATS;
  for (int i = 0; i < repeats; i++) {
    double before = f->is_bytes ? copy() : peak(k), start = now();
    int n = 0;
    do f->run(k, f->context), n++;
    while (now() - start < 2e-3);
    rate[i] = f->amount * n / (now() - start);
    double after = f->is_bytes ? copy() : peak(k), unit = before > after ? before : after;
    share[i] = rate[i] / unit;
    best_unit = unit > best_unit ? unit : best_unit;
  }
  qsort(share, (size_t)repeats, sizeof *share, ascending);
  qsort(rate, (size_t)repeats, sizeof *rate, ascending);
  const char *format =
      as_json ? "{\"kernel\":\"%s\",\"level\":\"%s\",\"threads\":%d,\"rate\":%.4g,\"unit\":\"%s\","
                "\"%s\":%.4g,"
                "\"share_best\":%.3f,\"share_median\":%.3f}\n"
              : "%-34s %-7s %d threads  %8.1f %s  %s %6.1f  share: best %.2f  median %.2f\n";
  printf(format, f->name, k->level, threads_count(), rate[repeats - 1] * 1e-9,
         f->is_bytes ? "GB/s" : "GFLOP/s", f->is_bytes ? "copy" : "peak", best_unit * 1e-9,
         rate[repeats - 1] / best_unit, share[repeats / 2]);
  fflush(stdout);
}

static void run_gemm(const CpuKernels *k, void *context) { k->gemm_f32(context); }

// Forward x w, x w', dgrad dy w' and wgrad x' dy (added to what is there) of a layer [K,N] at M
// rows.
static void bench_gemm(const CpuKernels *k) {
  static const int64_t shapes[][3] = {
      {2048, 384, 1152}, {2048, 384, 384}, {2048, 384, 1536}, {2048, 1536, 384}, {2048, 384, 256},
      {256, 768, 2304},  {256, 768, 768},  {256, 768, 3072},  {256, 3072, 768},  {256, 768, 50257}};
  static const char *const passes[] = {"NN", "NT", "dgrad", "wgrad"};
  for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
    int64_t M = shapes[s][0], K = shapes[s][1], N = shapes[s][2];
    float *x = array(M * K), *w = array(K * N), *y = array(M * N);
    for (int pass = 0; pass < 4; pass++) {
      Gemm g = {.m = M,
                .n = N,
                .k = K,
                .trans_b = pass == 1,
                .a = x,
                .b = w,
                .c = y,
                .lda = K,
                .ldb = pass == 1 ? K : N,
                .ldc = N,
                .alpha = 1};
      if (pass == 2)
        g = (Gemm){.m = M,
                   .n = K,
                   .k = N,
                   .trans_b = true,
                   .a = y,
                   .b = w,
                   .c = x,
                   .lda = N,
                   .ldb = N,
                   .ldc = K,
                   .alpha = 1};
      if (pass == 3)
        g = (Gemm){.m = K,
                   .n = N,
                   .k = M,
                   .trans_a = true,
                   .a = x,
                   .b = y,
                   .c = w,
                   .lda = K,
                   .ldb = N,
                   .ldc = N,
                   .alpha = 1e-3,
                   .beta = 1};
      Figure f = {
          .amount = 2.0 * (double)M * (double)N * (double)K, .run = run_gemm, .context = &g};
      snprintf(f.name, sizeof f.name, "gemm %ldx%ldx%ld %s", (long)M, (long)K, (long)N,
               passes[pass]);
      measure(k, &f);
    }
    free(x), free(w), free(y);
  }
}

static void run_attention(const CpuKernels *k, void *context) { k->attention_f32(context); }
static void run_attention_bwd(const CpuKernels *k, void *context) { k->attention_bwd_f32(context); }

static void bench_attention(const CpuKernels *k) {
  static const int64_t shapes[][4] = {{8, 256, 6, 64}, {4, 64, 12, 64}, {1, 2048, 6, 64}};
  for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
    int64_t B = shapes[s][0], T = shapes[s][1], H = shapes[s][2], D = shapes[s][3], C = H * D;
    float *qkv = array(B * T * 3 * C), *dqkv = array(B * T * 3 * C), *out = array(B * T * C);
    float *dout = array(B * T * C), *lse = array(B * H * T), *workspace = array(B * H * T);
    HeadStrides in = {T * 3 * C, 3 * C, D}, at = {T * C, C, D};
    Attention a = {.B = B,
                   .T = T,
                   .S = T,
                   .H = H,
                   .Hkv = H,
                   .D = D,
                   .q = qkv,
                   .k = qkv + C,
                   .v = qkv + 2 * C,
                   .q_at = in,
                   .k_at = in,
                   .v_at = in,
                   .scale = 0.125,
                   .causal = true,
                   .out = out,
                   .out_at = at,
                   .lse = lse,
                   .dout = dout,
                   .dout_at = at,
                   .dq = dqkv,
                   .dk = dqkv + C,
                   .dv = dqkv + 2 * C,
                   .dq_at = in,
                   .dk_at = in,
                   .dv_at = in,
                   .workspace = workspace};
    // The products that causal attention needs: 2 forward, 5 backward, over T (T + 1) / 2 pairs.
    double pairs = (double)(B * H) * (double)T * (double)(T + 1) / 2 * (double)D * 2;
    Figure f = {.amount = 2 * pairs, .run = run_attention, .context = &a};
    snprintf(f.name, sizeof f.name, "attention B%ld T%ld H%ld", (long)B, (long)T, (long)H);
    measure(k, &f);
    f.amount = 5 * pairs, f.run = run_attention_bwd;
    snprintf(f.name, sizeof f.name, "attention bwd B%ld T%ld H%ld", (long)B, (long)T, (long)H);
    measure(k, &f);
    free(qkv), free(dqkv), free(out), free(dout), free(lse), free(workspace);
  }
}

enum { ROW = 1024 };
static float *gain, *mean, *rstd, *norm_space;

static void run_softmax(const CpuKernels *k, void *context) {
  (void)context;
  Softmax s = {.rows = FLAT / ROW, .columns = ROW, .x = big[0], .y = big[1]};
  k->softmax_f32(&s);
}
static void run_norm(const CpuKernels *k, void *context) {
  (void)context;
  Norm n = {.rows = FLAT / ROW,
            .columns = ROW,
            .eps = 1e-5,
            .x = big[0],
            .gamma = gain,
            .beta = gain,
            .y = big[1],
            .mean = mean,
            .rstd = rstd};
  k->norm_f32(&n);
}
static void run_norm_bwd(const CpuKernels *k, void *context) {
  (void)context;
  Norm n = {.rows = FLAT / ROW,
            .columns = ROW,
            .eps = 1e-5,
            .x = big[0],
            .gamma = gain,
            .mean = mean,
            .rstd = rstd,
            .dy = big[2],
            .dx = big[1],
            .dgamma = gain + ROW,
            .dbeta = gain + 2 * ROW,
            .workspace = norm_space};
  k->norm_bwd_f32(&n);
}
typedef struct Flat {
  const CpuKernels *k;
  int fn;
  bool is_binary;
} Flat;
static void flat_block(void *context, int64_t begin, int64_t end) {
  const Flat *flat = context;
  if (flat->is_binary)
    flat->k->binary_f32((BinaryFn)flat->fn, big[1] + begin, big[2] + begin, big[0] + begin,
                        end - begin);
  else
    flat->k->unary_f32((UnaryFn)flat->fn, big[1] + begin, big[0] + begin, end - begin, 0, 0);
}
static void run_flat(const CpuKernels *k, void *context) {
  Flat *flat = context;
  flat->k = k;
  parallel_for(FLAT, 16384, flat_block, flat);
}
static void run_adamw(const CpuKernels *k, void *context) {
  (void)context;
  Adamw a = {.n = FLAT,
             .p = big[1],
             .g = big[0],
             .m = big[2],
             .v = big[3],
             .lr = 1e-3,
             .beta1 = 0.9,
             .beta2 = 0.99,
             .eps = 1e-8,
             .decay = 0.1,
             .grad_scale = 1,
             .step = 3};
  k->adamw_f32(&a);
}
static void run_squares(const CpuKernels *k, void *context) {
  (void)context;
  volatile double sink = k->sum_squares_f32(big[0], FLAT);
  (void)sink;
}
static void run_column_sum(const CpuKernels *k, void *context) {
  (void)context;
  Reduce r = {1, FLAT / ROW, ROW, big[0], gain, 0, false};
  k->reduce_f32(REDUCE_sum, &r);
}
static int64_t *targets;
static void run_cross_entropy(const CpuKernels *k, void *context) {
  (void)context;
  CrossEntropy c = {.rows = FLAT / ROW,
                    .columns = ROW,
                    .logits = big[0],
                    .targets = targets,
                    .ignore_index = -100,
                    .loss = mean,
                    .lse = rstd};
  k->cross_entropy_f32(&c);
}
static void run_dropout(const CpuKernels *k, void *context) {
  (void)context;
  Dropout d = {.samples = 1, .elements = FLAT, .x = big[0], .y = big[1], .p = 0.1, .key = 1};
  k->dropout_f32(&d);
}

static void bench_rows(const CpuKernels *k) {
  static Flat gelu = {.fn = UNARY_gelu}, gelu_tanh = {.fn = UNARY_gelu_tanh},
              gelu_bwd = {.fn = BINARY_gelu_bwd, .is_binary = true},
              add = {.fn = BINARY_add, .is_binary = true};
  const double n = 4.0 * FLAT;
  const Figure figures[] = {{"softmax 65536x1024", 2 * n, true, run_softmax, NULL},
                            {"layer_norm 65536x1024", 2 * n, true, run_norm, NULL},
                            {"layer_norm bwd 65536x1024", 3 * n, true, run_norm_bwd, NULL},
                            {"gelu", 2 * n, true, run_flat, &gelu},
                            {"gelu_tanh", 2 * n, true, run_flat, &gelu_tanh},
                            {"gelu bwd", 3 * n, true, run_flat, &gelu_bwd},
                            {"add", 3 * n, true, run_flat, &add},
                            {"adamw", 7 * n, true, run_adamw, NULL},
                            {"sum of squares", n, true, run_squares, NULL},
                            {"column sum 65536x1024", n, true, run_column_sum, NULL},
                            {"cross_entropy 65536x1024", n, true, run_cross_entropy, NULL},
                            {"dropout", 2 * n, true, run_dropout, NULL}};
  bool any = !only;
  for (size_t i = 0; i < sizeof figures / sizeof *figures; i++)
    any = any || strstr(figures[i].name, only);
  if (!any) return;
  for (int i = 0; i < 4; i++) big[i] = array(FLAT);
  for (int64_t i = 0; i < FLAT; i++) big[3][i] = big[3][i] * big[3][i];
  gain = array(3 * ROW), mean = array(FLAT / ROW), rstd = array(FLAT / ROW);
  norm_space = array((int64_t)norm_workspace(FLAT / ROW, ROW, 4) / 4);
  targets = calloc(FLAT / ROW, sizeof *targets);
  if (!targets) exit(1);
  for (size_t i = 0; i < sizeof figures / sizeof *figures; i++) measure(k, &figures[i]);
  for (int i = 0; i < 4; i++) free(big[i]);
  free(gain), free(mean), free(rstd), free(norm_space), free(targets);
}

// The cost of a call that has nearly nothing to do.
static void bench_small(const CpuKernels *k) {
  enum { CALLS = 200000 };
  float a[8] = {1, 2, 3, 4, 5, 6, 7, 8}, b[8];
  if (only && !strstr("gemm 8x8x1", only)) return;
  Gemm g = {
      .m = 1, .n = 8, .k = 1, .a = a, .b = a, .c = b, .lda = 1, .ldb = 8, .ldc = 8, .alpha = 1};
  double start = now();
  for (int i = 0; i < CALLS; i++) k->gemm_f32(&g);
  double each = (now() - start) / CALLS * 1e9;
  printf(as_json ? "{\"kernel\":\"tiny gemm\",\"ns\":%.1f}\n" : "tiny gemm: %.1f ns a call\n",
         each);
}

int main(int argc, char **argv) {
  const char *threads = "1,2";
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], "--json") == 0)
      as_json = true;
    else if (strcmp(argv[i], "--cpu-time") == 0)
      by_cpu_time = true;
    else if (strcmp(argv[i], "--only") == 0 && i + 1 < argc)
      only = argv[++i];
    else if (strcmp(argv[i], "--threads") == 0 && i + 1 < argc)
      threads = argv[++i];
    else
      return fprintf(stderr, "usage: %s [--json] [--cpu-time] [--threads 1,2] [--only WORD]\n",
                     argv[0]),
             2;
  }
  const CpuKernels *k = cpu_kernels();
  for (const char *at = threads; *at;) {
    char *end;
    long count = strtol(at, &end, 10);
    if (end == at || count < 1 || count > 256)
      return fprintf(stderr, "bad --threads %s\n", threads), 2;
    threads_set((int)count);
    bench_small(k);
    bench_gemm(k), bench_attention(k), bench_rows(k);
    at = *end == ',' ? end + 1 : end;
  }
  return 0;
}
