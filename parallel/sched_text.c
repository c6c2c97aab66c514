// sched_text - schedules as text: actions, CSV in torch.distributed.pipelining's form, JSON, and
// what the checker says.
#include "parallel/sched_inner.h"

#include <string.h>

// ---- actions ---------------------------------------------------------------------------------

void sched_print_action(const SchedOut *out, Action action) {
  if (action.kind == ACTION_OVERLAP_F_B) {
    sched_print(out, "OVERLAP_F_B");
    return;
  }
  sched_print(out, "%d%s", action.stage, action_text(action.kind));
  if (action.mb >= 0) sched_print(out, "%d", action.mb);
  bool is_neighbour = action.peer - action.stage == 1 || action.stage - action.peer == 1;
  if (action.peer >= 0 && !is_neighbour) sched_print(out, ":%d", action.peer);
}

int sched_print_cell(const SchedOut *out, const SchedRow *row, int index) {
  const Action *action = row->action + index;
  if (action->kind != ACTION_OVERLAP_F_B || index + 2 >= row->count) {
    sched_print_action(out, *action);
    return 1;
  }
  sched_print(out, "(");
  sched_print_action(out, action[1]);
  sched_print(out, ";");
  sched_print_action(out, action[2]);
  sched_print(out, ")%s", action_text(ACTION_OVERLAP_F_B));
  return 3;
}

void sched_print_csv(const SchedOut *out, const Sched *sched) {
  for (int rank = 0; rank < sched->ranks; rank++) {
    for (int i = 0; i < sched->row[rank].count;) {
      if (i > 0) sched_print(out, ",");
      i += sched_print_cell(out, &sched->row[rank], i);
    }
    sched_print(out, "\n");
  }
}

// ---- reading ---------------------------------------------------------------------------------

// A text being read.
typedef struct Reader {
  const char *at, *end;
} Reader;

static bool take(Reader *reader, char c) {
  if (reader->at == reader->end || *reader->at != c) return false;
  reader->at++;
  return true;
}

// A number of at most nine digits; false if there is none.
static bool take_number(Reader *reader, int *number) {
  const char *begin = reader->at;
  *number = 0;
  while (reader->at < reader->end && *reader->at >= '0' && *reader->at <= '9') {
    if (reader->at - begin == 9) return false;
    *number = 10 * *number + (*reader->at++ - '0');
  }
  return reader->at > begin;
}

// The longest kind whose text stands here.
static bool take_kind(Reader *reader, ActionKind *kind) {
  size_t longest = 0, left = (size_t)(reader->end - reader->at);
  for (int k = 0; k < ACTION_KINDS; k++) {
    const char *text = action_text((ActionKind)k);
    size_t length = (size_t)sched_length(text);
    if (length <= longest || length > left || memcmp(text, reader->at, length) != 0) continue;
    longest = length;
    *kind = (ActionKind)k;
  }
  reader->at += longest;
  return longest > 0;
}

// The stage at the other end of a message along the chain.
static int neighbour(Action action) {
  if (action_resource(action.kind) != USES_LINK) return -1;
  bool is_downstream = action.kind == ACTION_SEND_F || action.kind == ACTION_RECV_B;
  return is_downstream ? action.stage + 1 : action.stage - 1;
}

// A single action, without brackets.
static bool take_action(Reader *reader, Action *action) {
  *action = (Action){ACTION_F, -1, -1, -1};
  if (!take_number(reader, &action->stage) || !take_kind(reader, &action->kind)) return false;
  if (action->kind == ACTION_OVERLAP_F_B) return false;
  bool has_mb = take_number(reader, &action->mb);
  bool wants_mb = action->kind != ACTION_REDUCE_GRAD && action->kind != ACTION_STEP;
  if (!has_mb) action->mb = -1;
  if (has_mb != wants_mb) return false;
  action->peer = neighbour(*action);
  if (action_resource(action->kind) == USES_LINK && take(reader, ':'))
    return take_number(reader, &action->peer);
  return true;
}

// A cell: an action, or a pair (then action[0] is its marker). Returns how many; 0: not a cell.
static int take_cell(const char *text, size_t length, Action action[3]) {
  Reader reader = {text, text + length};
  if (!take(&reader, '(')) return take_action(&reader, &action[0]) && reader.at == reader.end;
  ActionKind kind = ACTION_F;
  bool is_pair =
      take_action(&reader, &action[1]) && take(&reader, ';') && take_action(&reader, &action[2]) &&
      take(&reader, ')') && take_kind(&reader, &kind) && kind == ACTION_OVERLAP_F_B &&
      reader.at == reader.end && action[1].kind == ACTION_F && action[2].kind == ACTION_B;
  action[0] = (Action){ACTION_OVERLAP_F_B, action[1].stage, action[1].mb, -1};
  return is_pair ? 3 : 0;
}

static bool is_space(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '"'; }

// Cuts blanks and quotes from both ends.
static void trim(const char **text, size_t *length) {
  while (*length > 0 && is_space(**text)) (*text)++, (*length)--;
  while (*length > 0 && is_space((*text)[*length - 1])) (*length)--;
}

Status sched_push_text(Sched *sched, int rank, const char *text, size_t length) {
  Action action[3];
  if (rank < 0 || rank >= sched->ranks)
    return sched_fail(sched->arena, ST_EVALUE, "rank %d: ranks are 0 to %d", rank,
                      sched->ranks - 1);
  trim(&text, &length);
  int count = take_cell(text, length, action);
  if (count == 0)
    return sched_fail(
        sched->arena, ST_EFORMAT,
        "rank %d, action %d: `%.*s` is not an action; they look like 2F0, 0REDUCE_GRAD "
        "or (2F5;1B3)OVERLAP_F_B",
        rank, sched->row[rank].count, length < 60 ? (int)length : 60, text);
  for (int i = 0; i < count; i++) TRY(sched_push(sched, rank, action[i]));
  return ST_OK;
}

// ---- CSV in ----------------------------------------------------------------------------------

// The next cell of a row; false at its end. Cells are separated by commas or semicolons outside of
// brackets.
static bool next_cell(const char **at, const char *end, const char **cell, size_t *length) {
  if (*at > end) return false;
  const char *begin = *at, *stop = begin;
  int depth = 0;
  while (stop < end && (*stop != ',' || depth > 0)) {
    if (*stop == '(') depth++;
    if (*stop == ')' && depth > 0) depth--;
    stop++;
  }
  *cell = begin;
  *length = (size_t)(stop - begin);
  trim(cell, length);
  *at = stop + 1;
  return true;
}

// Calls visit for each cell that is not empty, with its row. Rows without any cell count, but not
// an empty last one.
typedef Status (*CellVisit)(void *user, int row, int cell, const char *text, size_t length);
static Status each_cell(const char *text, size_t length, CellVisit visit, void *user, int *rows) {
  const char *end = text + length;
  *rows = 0;
  for (const char *line = text; line < end; (*rows)++) {
    const char *stop = line, *at = line, *cell;
    size_t n;
    while (stop < end && *stop != '\n') stop++;
    for (int index = 0; next_cell(&at, stop, &cell, &n); index++)
      if (n > 0) TRY(visit(user, *rows, index, cell, n));
    line = stop + 1;
  }
  return ST_OK;
}

// What a first pass over the text finds out.
typedef struct Survey {
  SchedArena *arena;
  int *holder; // [room] the rank that ran a stage first
  int room, stages, mbs;
} Survey;

static Status see_action(Survey *survey, int row, Action action) {
  if (action_resource(action.kind) != USES_COMPUTE) return ST_OK;
  if (!survey->holder || action.stage >= survey->room) {
    enum { STAGES_MAX = 1 << 20 };
    if (action.stage >= STAGES_MAX)
      return sched_fail(survey->arena, ST_EFORMAT, "row %d: stage %d is too large", row,
                        action.stage);
    int room = 2 * action.stage + 16;
    int *grown = sched_alloc(survey->arena, (size_t)room, sizeof *grown);
    if (!grown) return ST_ENOMEM;
    memset(grown, -1, (size_t)room * sizeof *grown);
    if (survey->room > 0) memcpy(grown, survey->holder, (size_t)survey->room * sizeof *grown);
    survey->holder = grown;
    survey->room = room;
  }
  if (survey->holder[action.stage] < 0) survey->holder[action.stage] = row;
  if (action.stage >= survey->stages) survey->stages = action.stage + 1;
  if (action.mb >= survey->mbs) survey->mbs = action.mb + 1;
  return ST_OK;
}

static Status see_cell(void *user, int row, int cell, const char *text, size_t length) {
  Survey *survey = user;
  Action action[3];
  int count = take_cell(text, length, action);
  if (count == 0)
    return sched_fail(survey->arena, ST_EFORMAT,
                      "row %d, cell %d: `%.*s` is not an action; they look like 2F0, 0REDUCE_GRAD "
                      "or (2F5;1B3)OVERLAP_F_B",
                      row, cell, length < 60 ? (int)length : 60, text);
  for (int i = 0; i < count; i++) TRY(see_action(survey, row, action[i]));
  return ST_OK;
}

static Status push_cell(void *user, int row, int cell, const char *text, size_t length) {
  (void)cell;
  return sched_push_text(user, row, text, length);
}

Status sched_parse_csv(SchedArena *arena, Sched **out, const char *name, const char *text,
                       size_t length) {
  Survey survey = {.arena = arena};
  int rows;
  TRY(each_cell(text, length, see_cell, &survey, &rows));
  if (survey.stages == 0 || !survey.holder)
    return sched_fail(arena, ST_EFORMAT,
                      "no action in it: expected a row a rank, a cell an action");
  if (survey.stages % rows != 0)
    return sched_fail(arena, ST_EFORMAT,
                      "%d stages on %d rows: each rank must hold the same number of stages",
                      survey.stages, rows);
  for (int stage = 0; stage < survey.stages; stage++)
    if (survey.holder[stage] < 0)
      return sched_fail(arena, ST_EFORMAT, "no row runs stage %d, but one runs stage %d", stage,
                        survey.stages - 1);
  Sched *sched;
  TRY(sched_new(arena, &sched, name, rows, survey.stages / rows, survey.mbs, PLACE_GIVEN,
                survey.holder));
  TRY(each_cell(text, length, push_cell, sched, &rows));
  *out = sched;
  return ST_OK;
}

// ---- the checker's table ---------------------------------------------------------------------

enum { CELL_WIDTH_MAX = 40 };

// The text of cell `index` of a row in a buffer; returns its length.
static int cell_text(const SchedRow *row, int index, char text[CELL_WIDTH_MAX + 1]) {
  SchedName name = sched_name(row->action[index]);
  int length = 0;
  while (length < CELL_WIDTH_MAX && name.text[length]) length++;
  memcpy(text, name.text, (size_t)length);
  text[length] = 0;
  return length;
}

// The rows around the offending action, cell k of all rows below each other.
static void print_table(const SchedOut *out, const Sched *sched, const SchedReport *report,
                        int width) {
  enum { RANKS_SHOWN = 24, LABEL = 10 };
  int arrow_rank = report->at.rank, wide = 1;
  int arrow = report->at.index >= 0 ? report->at.index : sched->row[arrow_rank].count;
  char text[CELL_WIDTH_MAX + 1];
  int first_rank = arrow_rank > RANKS_SHOWN / 2 ? arrow_rank - RANKS_SHOWN / 2 : 0;
  int last_rank = first_rank + RANKS_SHOWN < sched->ranks ? first_rank + RANKS_SHOWN : sched->ranks;
  // The cells shown: as many as fit, the arrow in the middle.
  int begin = arrow, end = arrow + 1;
  for (bool grows = true; grows;) {
    grows = false;
    for (int side = 0; side < 2; side++) {
      int k = side == 0 ? begin - 1 : end, widest = wide;
      bool is_there = false;
      for (int rank = first_rank; rank < last_rank; rank++) {
        if (k < 0 || k >= sched->row[rank].count) continue;
        int length = cell_text(&sched->row[rank], k, text);
        if (length > widest) widest = length;
        is_there = true;
      }
      if (!is_there || LABEL + (end - begin + 1) * (widest + 1) > width) continue;
      wide = widest;
      if (side == 0)
        begin--;
      else
        end++;
      grows = true;
    }
  }
  for (int rank = first_rank; rank < last_rank; rank++) {
    const SchedRow *row = &sched->row[rank];
    sched_print(out, "rank %-3d%s", rank, begin > 0 ? ".." : "  ");
    for (int i = begin; i < end && i < row->count; i++) {
      cell_text(row, i, text);
      sched_print(out, "%-*s ", wide, text);
    }
    sched_print(out, "%s\n", end < row->count ? ".." : "");
    if (rank == arrow_rank)
      sched_print(out, "%*s^ here\n", LABEL + (arrow - begin) * (wide + 1), "");
  }
}

// Each line waits for the next, the last for the first.
static void print_cycle(const SchedOut *out, const Sched *sched, const SchedReport *report) {
  int n = report->cycle_length;
  for (int i = 0; i < n; i++) {
    SchedPlace at = report->cycle[i], wanted = report->wanted[i];
    const char *corner = n == 1 ? "'->" : i == 0 ? ".->" : i == n - 1 ? "`--" : "|  ";
    sched_print(out, "  %s rank %d stands at %s (action %d) and waits for ", corner, at.rank,
                sched_name(sched->row[at.rank].action[at.index]).text, at.index);
    if (wanted.rank < 0 || wanted.index < 0)
      sched_print(out, "what no rank ever does\n");
    else
      sched_print(out, "%s, action %d of rank %d\n",
                  sched_name(sched->row[wanted.rank].action[wanted.index]).text, wanted.index,
                  wanted.rank);
    if (i + 1 < n) sched_print(out, "  |        |\n");
  }
}

void sched_print_report(const SchedOut *out, const Sched *sched, const SchedReport *report,
                        int width) {
  static const char *const words[] = {
      "",
      "every stage and microbatch has one F and one B, or one F, one I and one W",
      "F comes before I or B, and that before W",
      "sends and receives match pairwise, in the order of their channel",
      "no deadlock, even where a send waits for its receiver",
      "live activations stay within the declared bound",
      "each reduction comes once, after all its contributions",
      "each stage and microbatch runs on the rank that holds the stage",
  };
  if (!report->broken) {
    sched_print(out, "%s: invariants 1 to 7 hold", sched->name);
    if (report->is_to_rounding) {
      const Action *action = sched->row[report->at.rank].action;
      sched_print(out, "; 8 does not (%s on rank %d): gradients are equal to rounding only\n",
                  sched_name(action[report->at.index]).text, report->at.rank);
    } else
      sched_print(out, "; so does 8: gradients have one process's bits\n");
    return;
  }
  sched_print(out, "%s breaks invariant %d: %s\n", sched->name, report->broken,
              words[report->broken]);
  sched_print(out, "%s\n\n", report->message);
  print_table(out, sched, report, width > 0 ? width : 100);
  if (report->cycle_length > 0) {
    sched_print(out, "\nwho waits for whom:\n");
    print_cycle(out, sched, report);
  }
}
