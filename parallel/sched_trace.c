// sched_trace - a simulated schedule as Chrome trace JSON: a process a rank, the actions as slices,
// the live activations as a counter.
#include "parallel/sched_inner.h"

static void print_counter(const SchedOut *out, int rank, double ts, int64_t live, int chunks) {
  sched_print(out,
              ",\n{\"ph\":\"C\",\"name\":\"live activations\",\"pid\":%d,\"ts\":%g,"
              "\"args\":{\"microbatches\":%g}}",
              rank, ts, (double)live / chunks);
}

void sched_draw_trace(const SchedOut *out, const Sched *sched, const SchedSim *sim,
                      double unit_us) {
  sched_print(out, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
  for (int rank = 0; rank < sched->ranks; rank++) {
    int64_t live = 0;
    sched_print(out,
                "%s\n{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,"
                "\"args\":{\"name\":\"rank %d\"}}",
                rank > 0 ? "," : "", rank, rank);
    for (int i = 0; i < sched->row[rank].count; i++) {
      Action action = sched->row[rank].action[i];
      SchedSpan span = sim->span[sim->first[rank] + i];
      int does = action_properties(action.kind);
      if (action_resource(action.kind) == USES_NOTHING) continue;
      if (does & KEEPS) print_counter(out, rank, span.start * unit_us, ++live, sched->chunks);
      // Slices of one thread may not overlap: the second half of a pair has its own.
      int thread = i > 1 && sched->row[rank].action[i - 2].kind == ACTION_OVERLAP_F_B;
      sched_print(out,
                  ",\n{\"ph\":\"X\",\"name\":\"%s\",\"cat\":\"%s\",\"pid\":%d,\"tid\":%d,"
                  "\"ts\":%g,\"dur\":%g",
                  sched_name(action).text, action_text(action.kind), rank, thread,
                  span.start * unit_us, (span.end - span.start) * unit_us);
      sched_print(out, ",\"args\":{\"stage\":%d,\"microbatch\":%d,\"waited\":%g}}", action.stage,
                  action.mb, span.waited * unit_us);
      if (does & FREES) print_counter(out, rank, span.end * unit_us, --live, sched->chunks);
    }
  }
  sched_print(out, "\n]}\n");
}
