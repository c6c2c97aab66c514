// peer_llmc - llm.c's CPU trainer as a side of the benchmark (worker.lua has the protocol).
//
// Usage: peer_llmc LAYERS HEADS CHANNELS T B VOCAB
// Compiled with -DTESTING -include <checkout>/train_gpt2.c: its model, its kernels, its step,
// without its main(). Weights and tokens are made up. Its step has no clipping of gradients.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static unsigned state = 1;
static unsigned draw(void) { return state = state * 1664525u + 1013904223u; }

// Uniform with GPT-2's standard deviation 0.02; norm gains 1.
static void make_weights(GPT2 *model) {
  fill_in_parameter_sizes(model->param_sizes, model->config);
  model->num_parameters = 0;
  for (int i = 0; i < NUM_PARAMETER_TENSORS; i++) model->num_parameters += model->param_sizes[i];
  model->params_memory = malloc_and_point_parameters(&model->params, model->param_sizes);
  for (size_t i = 0; i < model->num_parameters; i++)
    model->params_memory[i] = 0.0346f * ((float)(draw() >> 8) / 8388608.0f - 1);
  size_t layers = (size_t)model->config.num_layers, channels = (size_t)model->config.channels;
  for (size_t i = 0; i < layers * channels; i++) model->params.ln1w[i] = model->params.ln2w[i] = 1;
  for (size_t i = 0; i < channels; i++) model->params.lnfw[i] = 1;
}

int main(int argc, char **argv) {
  if (argc != 7) return 2;
  int B = atoi(argv[5]), T = atoi(argv[4]), vocab = atoi(argv[6]), step = 0;
  FILE *answers = fdopen(dup(1), "w");
  if (!answers || dup2(2, 1) < 0) return 1; // what the trainer prints must not mix with the answers
  GPT2 model;
  memset(&model, 0, sizeof model);
  model.config = (GPT2Config){.max_seq_len = T,
                              .vocab_size = vocab,
                              .padded_vocab_size = (vocab + 127) / 128 * 128,
                              .num_layers = atoi(argv[1]),
                              .num_heads = atoi(argv[2]),
                              .channels = atoi(argv[3])};
  model.mean_loss = -1;
  make_weights(&model);
  int *tokens = malloc(sizeof(int) * (size_t)(B * T + 1));
  if (!tokens) return 1;
  for (int i = 0; i <= B * T; i++) tokens[i] = (int)((draw() >> 8) % (unsigned)vocab);

  char line[64];
  for (int n = 1; n >= 0;) {
    for (int i = 0; i < n; i++) {
      double start = now();
      gpt2_forward(&model, tokens, tokens + 1, (size_t)B, (size_t)T);
      gpt2_zero_grad(&model);
      gpt2_backward(&model);
      gpt2_update(&model, 3e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, ++step);
      if (step > 1) fprintf(answers, "%.9f%c", now() - start, i + 1 < n ? ' ' : '\n');
    }
    if (step == 1 && n == 1) fprintf(answers, "ready version=f32\n");
    fflush(answers);
    n = 0;
    if (!fgets(line, sizeof line, stdin)) break;
    if (sscanf(line, "run %d", &n) != 1) {
      struct rusage usage;
      getrusage(RUSAGE_SELF, &usage);
      fprintf(answers, "peak_bytes=%ld loss=%.4f\n", usage.ru_maxrss * 1024,
              (double)model.mean_loss);
    }
  }
  gpt2_free(&model);
  free(tokens);
  fclose(answers);
  return 0;
}
