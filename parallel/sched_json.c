// sched_json - a simulated schedule as one JSON object.
#include "parallel/sched_inner.h"

SchedCase sched_case(const Sched *sched, const SchedCosts *costs) {
  return (SchedCase){.ranks = sched->ranks,
                     .chunks = sched->chunks,
                     .mbs = sched->mbs,
                     .group = sched->group,
                     .F = costs->F,
                     .I = costs->I,
                     .W = costs->W,
                     .overlap = costs->overlap};
}

bool sched_has_formula(const Sched *sched, const SchedCosts *costs) {
  return sched->type && !costs->price && !costs->stage_factor && !costs->mb_factor &&
         !(costs->hop > 0) && !(costs->bytes_per_second > 0);
}

static void print_string(const SchedOut *out, const char *text) {
  sched_print(out, "\"");
  for (; *text; text++) {
    unsigned char c = (unsigned char)*text;
    if (c == '"' || c == '\\')
      sched_print(out, "\\%c", c);
    else if (c < 0x20)
      sched_print(out, "\\u00%c%c", '0' + c / 16, "0123456789abcdef"[c % 16]);
    else
      sched_print(out, "%c", c);
  }
  sched_print(out, "\"");
}

static void print_actions(const SchedOut *out, const Sched *sched, const SchedSim *sim) {
  sched_print(out, "  \"actions\": [");
  for (int rank = 0; rank < sched->ranks; rank++) {
    sched_print(out, "%s\n    [", rank > 0 ? "," : "");
    for (int i = 0; i < sched->row[rank].count; i++) {
      Action action = sched->row[rank].action[i];
      SchedSpan span = sim->span[sim->first[rank] + i];
      sched_print(out, "%s\n      {\"action\": \"%s\", \"kind\": \"%s\"", i > 0 ? "," : "",
                  sched_name(action).text, action_text(action.kind));
      sched_print(out, ", \"stage\": %d", action.stage);
      if (action.mb >= 0) sched_print(out, ", \"mb\": %d", action.mb);
      sched_print(out, ", \"start\": %g, \"end\": %g}", span.start, span.end);
    }
    sched_print(out, "]");
  }
  sched_print(out, "],\n");
}

// Formulas, null where none holds.
static void print_formulas(const SchedOut *out, const Sched *sched, const SchedCosts *costs) {
  SchedCase c = sched_case(sched, costs);
  double bubble;
  bool holds = sched_has_formula(sched, costs);
  sched_print(out, "  \"formula\": {\"makespan_bubble\": ");
  if (holds && sched->type->makespan(&c, &bubble))
    sched_print(out, "%g", bubble);
  else
    sched_print(out, "null");
  sched_print(out, ", \"span_bubble\": ");
  if (holds && sched->type->span(&c, &bubble))
    sched_print(out, "%g", bubble);
  else
    sched_print(out, "null");
  sched_print(out, ", \"peak_activations\": ");
  if (!sched->type) sched_print(out, "null");
  for (int rank = 0; sched->type && rank < sched->ranks; rank++)
    sched_print(out, "%s%g", rank > 0 ? ", " : "[",
                (double)sched->type->peak(&c, rank) / sched->chunks);
  sched_print(out, "%s}", sched->type ? "]" : "");
}

void sched_print_json(const SchedOut *out, const Sched *sched, const SchedSim *sim,
                      const SchedCosts *costs, const SchedReport *report) {
  sched_print(out, "{\n  \"schedule\": ");
  print_string(out, sched->name);
  sched_print(out, ",\n  \"ranks\": %d, \"stages_per_rank\": %d, \"stages\": %d, ", sched->ranks,
              sched->chunks, sched->stages);
  sched_print(out, "\"microbatches\": %d,\n  \"placement\": [", sched->mbs);
  for (int stage = 0; stage < sched->copies * sched->stages; stage++)
    sched_print(out, "%s%d", stage > 0 ? ", " : "", sched->holder[stage]);
  sched_print(out, "],\n  \"costs\": {\"F\": %g, \"I\": %g, \"W\": %g, \"overlap\": ", costs->F,
              costs->I, costs->W);
  if (costs->overlap >= 0)
    sched_print(out, "%g", costs->overlap);
  else
    sched_print(out, "null");
  sched_print(out, ", \"hop\": %g},\n", costs->hop);
  print_actions(out, sched, sim);
  sched_print(out, "  \"makespan\": %g,\n  \"makespan_bubble\": %g,\n  \"span_bubble\": %g,\n",
              sim->makespan, sim->makespan_bubble, sim->span_bubble);
  sched_print(out, "  \"peak_activations\": [");
  for (int rank = 0; rank < sched->ranks; rank++)
    sched_print(out, "%s%g", rank > 0 ? ", " : "", (double)sim->peak[rank] / sched->chunks);
  sched_print(out, "],\n");
  if (report) {
    sched_print(out, "  \"bit_for_bit\": %s,\n  \"channel_depths\": [",
                report->is_to_rounding ? "false" : "true");
    for (int i = 0; i < report->depths; i++)
      sched_print(out, "%s{\"from\": %d, \"to\": %d, \"depth\": %d}", i > 0 ? ", " : "",
                  report->depth[i].from, report->depth[i].to, report->depth[i].depth);
    sched_print(out, "],\n");
  }
  if (*sched->warning) {
    sched_print(out, "  \"warning\": ");
    print_string(out, sched->warning);
    sched_print(out, ",\n");
  }
  print_formulas(out, sched, costs);
  sched_print(out, "\n}\n");
}
