// ledger - gaps between spans, what the schedule itself explains of them, and who is to blame for
// the rest.
#include "parallel/ledger.h"

#include "parallel/sched_inner.h"

#include <string.h>

const char *ledger_cause(LedgerCause cause) {
  static const char *const words[LEDGER_CAUSES] = {
#define X(name, word, meaning) word,
      LEDGER_CAUSE_LIST(X)
#undef X
  };
  return words[cause];
}

typedef struct Book {
  SchedArena *arena;
  const Sched *sched;
  const int64_t *first;
  const SchedSpan *span;
  const LedgerMessage *message;
  SchedIndex index;
  SchedPlace *send;               // [messages] where it stands; rank -1: nowhere
  double usual[ACTION_KINDS];     // seconds
  const SchedSim *sim;            // with usual times and no latency
  int *first_back, *last_forward; // [ranks] indices in the rows; -1: none
  Ledger *ledger;
} Book;

static const SchedPlace NOWHERE = {-1, -1};

static const SchedSpan *span_at(const Book *book, SchedPlace place) {
  return &book->span[book->first[place.rank] + place.index];
}

static Action action_at(const Book *book, SchedPlace place) {
  return book->sched->row[place.rank].action[place.index];
}

static double positive(double x) { return x > 0 ? x : 0; }
static double least(double a, double b) { return a < b ? a : b; }

// ---- collectives -----------------------------------------------------------------------------

// A copy of the spans in which a REDUCE_TIED begins when the last rank of its group came to it:
// what is before that is waiting, whether or not the spans count it so.
static Status meet(Book *book) {
  const Sched *sched = book->sched;
  int64_t count = book->first[sched->ranks];
  SchedSpan *span = sched_alloc(book->arena, (size_t)count, sizeof *span);
  double *latest = sched_alloc(book->arena, (size_t)sched->tied_groups + 1, sizeof *latest);
  bool *is_known = sched_alloc(book->arena, (size_t)sched->tied_groups + 1, sizeof *is_known);
  if (!span || !latest || !is_known) return ST_ENOMEM;
  memcpy(span, book->span, (size_t)count * sizeof *span);
  for (int pass = 0; pass < 2; pass++) {
    for (int rank = 0; rank < sched->ranks; rank++) {
      for (int i = 0; i < sched->row[rank].count; i++) {
        Action action = sched->row[rank].action[i];
        SchedSpan *own = &span[book->first[rank] + i];
        bool is_tied = action.kind == ACTION_REDUCE_TIED && own->end > own->start;
        if (!is_tied || action.mb < 0 || action.mb >= sched->tied_groups) continue;
        double *last = &latest[action.mb];
        if (pass == 0 && (!is_known[action.mb] || own->start > *last)) *last = own->start;
        is_known[action.mb] = true;
        if (pass == 1 && *last > own->start) own->start = least(*last, own->end);
      }
    }
  }
  book->span = span;
  return ST_OK;
}

// ---- usual times -----------------------------------------------------------------------------

static void sift_down(double *heap, int64_t count, int64_t i) {
  double moving = heap[i];
  for (int64_t child; (child = 2 * i + 1) < count; i = child) {
    if (child + 1 < count && heap[child + 1] > heap[child]) child++;
    if (heap[child] <= moving) break;
    heap[i] = heap[child];
  }
  heap[i] = moving;
}

// The lower median; sorts the values.
static double median(double *value, int64_t count) {
  for (int64_t i = count / 2 - 1; i >= 0; i--) sift_down(value, count, i);
  for (int64_t left = count - 1; left > 0; left--) {
    double largest = value[0];
    value[0] = value[left];
    value[left] = largest;
    sift_down(value, left, 0);
  }
  return value[(count - 1) / 2];
}

// The times of a kind of action of a stage, at most `room`; returns how many.
static int64_t times_of(const Book *book, ActionKind kind, int stage, double *time, int64_t room) {
  int64_t count = 0;
  int rank = book->sched->holder[stage];
  const SchedRow *row = &book->sched->row[rank];
  for (int i = 0; i < row->count && count < room; i++) {
    if (row->action[i].kind != kind || row->action[i].stage != stage) continue;
    const SchedSpan *span = &book->span[book->first[rank] + i];
    time[count++] = span->end - span->start;
  }
  return count;
}

// Of each kind: the median over stages of the medians over microbatches, the lower where there are
// two, so that one slow rank of two is no usual one.
static Status find_usual(Book *book) {
  int stages = book->sched->copies * book->sched->stages;
  int64_t room = (int64_t)book->sched->mbs + book->sched->tied_groups;
  double *time = sched_alloc(book->arena, (size_t)room, sizeof *time);
  double *by_stage = sched_alloc(book->arena, (size_t)stages, sizeof *by_stage);
  if (!time || !by_stage) return ST_ENOMEM;
  for (int kind = 0; kind < ACTION_KINDS; kind++) {
    SchedResource resource = action_resource((ActionKind)kind);
    if (resource == USES_LINK || kind == ACTION_OVERLAP_F_B) continue;
    int64_t known = 0;
    for (int stage = 0; stage < stages; stage++) {
      int64_t count = times_of(book, (ActionKind)kind, stage, time, room);
      if (count > 0) by_stage[known++] = median(time, count);
    }
    if (known > 0) book->usual[kind] = median(by_stage, known);
  }
  return ST_OK;
}

static double usual_price(const void *user, Action action) {
  const double *usual = user;
  return usual[action.kind];
}

static Status simulate_usual(Book *book) {
  SchedSim *sim;
  SchedCosts costs = sched_costs(0, 0, 0);
  costs.price = usual_price;
  costs.user = book->usual;
  costs.reduce_grad = book->usual[ACTION_REDUCE_GRAD];
  costs.reduce_tied = book->usual[ACTION_REDUCE_TIED];
  costs.step = book->usual[ACTION_STEP];
  TRY(sched_simulate(book->arena, &sim, book->sched, &costs));
  book->sim = sim;
  return ST_OK;
}

// ---- messages and phases ---------------------------------------------------------------------

static Status find_places(Book *book) {
  const Sched *sched = book->sched;
  size_t messages = (size_t)sched_messages(sched), ranks = (size_t)sched->ranks;
  book->send = sched_alloc(book->arena, messages, sizeof *book->send);
  book->first_back = sched_alloc(book->arena, ranks, sizeof *book->first_back);
  book->last_forward = sched_alloc(book->arena, ranks, sizeof *book->last_forward);
  if (!book->send || !book->first_back || !book->last_forward) return ST_ENOMEM;
  for (size_t i = 0; i < messages; i++) book->send[i] = NOWHERE;
  for (int rank = 0; rank < sched->ranks; rank++) {
    const SchedRow *row = &sched->row[rank];
    book->first_back[rank] = row->count;
    book->last_forward[rank] = -1;
    for (int i = 0; i < row->count; i++) {
      int does = action_properties(row->action[i].kind);
      if ((does & GIVES_GRAD) && i < book->first_back[rank]) book->first_back[rank] = i;
      if (does & GIVES_OUTPUT) book->last_forward[rank] = i;
      int64_t message = does & SENDS ? sched_message(sched, row->action[i]) : -1;
      if (message >= 0) book->send[message] = (SchedPlace){rank, i};
    }
  }
  return ST_OK;
}

// An input of a compute action that came from another rank, the latest.
typedef struct Input {
  SchedPlace from; // the compute action that made it; rank -1: there is no such input
  double sent, arrived;
} Input;

// As the executor wrote it down.
static Input measured_input(const Book *book, SchedPlace place) {
  const LedgerMessage *message = &book->message[book->first[place.rank] + place.index];
  Action action = action_at(book, place);
  int stages = book->sched->copies * book->sched->stages;
  if (message->from < 0 || message->from >= stages) return (Input){.from = NOWHERE};
  int64_t cell = sched_cell(book->sched, message->from, action.mb);
  int rank = book->sched->holder[message->from];
  bool is_grad = action_properties(action.kind) & NEEDS_GRAD;
  int index = is_grad ? book->index.b[cell] : book->index.f[cell];
  if (index < 0 || rank == place.rank) return (Input){.from = NOWHERE};
  double arrived = message->arrived > message->sent ? message->arrived : message->sent;
  return (Input){{rank, index}, message->sent, arrived};
}

static Input latest_input(const Book *book, SchedPlace place) {
  const Sched *sched = book->sched;
  Action action = action_at(book, place);
  int needs = action_properties(action.kind) & (NEEDS_OUTPUT | NEEDS_GRAD);
  bool is_grad = needs == NEEDS_GRAD;
  Input latest = {.from = NOWHERE};
  if (!needs) return latest;
  if (book->message) return measured_input(book, place);
  SchedEdgeWalk walk = {.sched = sched, .stage = action.stage, .is_into = !is_grad};
  while (sched_next_edge(&walk)) {
    int rank = sched->holder[walk.other];
    if (rank == place.rank || (is_grad && !walk.has_grad)) continue;
    Action send = {is_grad ? ACTION_SEND_B : ACTION_SEND_F, walk.other, action.mb, action.stage};
    SchedPlace at = book->send[sched_message(sched, send)];
    if (at.rank < 0) continue;
    double sent = span_at(book, at)->start;
    if (latest.from.rank >= 0 && sent <= latest.arrived) continue;
    int64_t cell = sched_cell(sched, walk.other, action.mb);
    latest = (Input){{rank, is_grad ? book->index.b[cell] : book->index.f[cell]}, sent, sent};
  }
  return latest;
}

// Since when a rank is free before an action: the latest end of those before it.
static double free_since(const Book *book, SchedPlace place) {
  double since = book->ledger->begin;
  for (int i = place.index - 1; i >= 0; i--) {
    double end = book->span[book->first[place.rank] + i].end;
    if (end > since) since = end;
    if (action_resource(book->sched->row[place.rank].action[i].kind) == USES_COMPUTE) break;
  }
  return since;
}

// The compute action before it on its rank; index -1: none.
static SchedPlace before(const Book *book, SchedPlace place) {
  const SchedRow *row = &book->sched->row[place.rank];
  int i = place.index - 1;
  while (i >= 0 && action_resource(row->action[i].kind) != USES_COMPUTE) i--;
  return (SchedPlace){place.rank, i};
}

// ---- blame -----------------------------------------------------------------------------------

static void charge(Book *book, int rank, LedgerCause cause, double time) {
  book->ledger->cause[rank * LEDGER_CAUSES + cause] += time;
}

// Charges rank `victim` with up to `*left` of `time` because rank `culprit` was late.
static void charge_late(Book *book, int victim, int culprit, double time, double *left) {
  double part = least(positive(time), *left);
  charge(book, victim, LEDGER_LATE, part);
  book->ledger->late[victim * book->ledger->ranks + culprit] += part;
  *left -= part;
}

static void charge_link(Book *book, int victim, int from, int to, double time, double *left) {
  double part = least(positive(time), *left);
  charge(book, victim, LEDGER_LINK, part);
  book->ledger->link[from * book->ledger->ranks + to] += part;
  *left -= part;
}

// Follows back what held up `victim` for `left` seconds, from the action at `place` that it waited
// for: each action pays for what it took beyond the usual, each message for its time under way.
static void blame(Book *book, int victim, SchedPlace place, double left) {
  int nearest = place.rank;
  while (left > 0 && place.index >= 0) {
    const SchedSpan *span = span_at(book, place);
    double usual = book->usual[action_at(book, place).kind];
    charge_late(book, victim, place.rank, span->end - span->start - usual, &left);
    Input input = latest_input(book, place);
    double since = free_since(book, place);
    if (input.from.rank >= 0 && input.arrived > since) {
      charge_late(book, victim, place.rank, span->start - input.arrived, &left);
      charge_link(book, victim, input.from.rank, place.rank, input.arrived - input.sent, &left);
      charge_late(book, victim, input.from.rank, input.sent - span_at(book, input.from)->end,
                  &left);
      place = input.from;
    } else {
      charge_late(book, victim, place.rank, span->start - since, &left);
      place = before(book, place);
    }
  }
  charge_late(book, victim, nearest, left, &left);
}

// ---- gaps ------------------------------------------------------------------------------------

static LedgerCause phase(const Book *book, SchedPlace place) {
  if (place.index <= book->first_back[place.rank]) return LEDGER_WARM_UP;
  return place.index > book->last_forward[place.rank] ? LEDGER_COOL_DOWN : LEDGER_ORDER;
}

// The gap [since, start) before an action, which the simulation gives `expected` seconds.
static void enter_gap(Book *book, SchedPlace place, double since, double expected) {
  double start = span_at(book, place)->start, gap = start - since;
  SchedResource resource = action_resource(action_at(book, place).kind);
  if (resource == USES_GROUP || action_at(book, place).kind == ACTION_STEP) {
    charge(book, place.rank, LEDGER_BARRIER, gap);
    return;
  }
  Input input = latest_input(book, place);
  double waited = input.from.rank < 0 ? 0 : least(positive(input.arrived - since), gap);
  charge(book, place.rank, LEDGER_OWN, gap - waited);
  double own = least(waited, positive(expected)), left = waited - own;
  charge(book, place.rank, phase(book, place), own);
  // What of the rest the message itself was under way, and the rest of that by its sender.
  charge_link(book, place.rank, input.from.rank, place.rank, input.arrived - input.sent, &left);
  if (left <= 0) return;
  charge_late(book, place.rank, input.from.rank, input.sent - span_at(book, input.from)->end,
              &left);
  blame(book, place.rank, input.from, left);
}

// The time from the rank's last end to the end of the step, for which the last action of all is
// to blame beyond what the simulation has there.
static void enter_end(Book *book, int rank, double since, SchedPlace last) {
  double gap = book->ledger->end - since;
  double expected = book->sim->makespan;
  const SchedSpan *sim = book->sim->span + book->sim->first[rank];
  for (int i = 0; i < book->sched->row[rank].count; i++)
    expected = least(expected, book->sim->makespan - sim[i].end);
  double own = least(gap, positive(expected));
  charge(book, rank, LEDGER_COOL_DOWN, own);
  if (gap > own) blame(book, rank, last, gap - own);
}

static void enter_rank(Book *book, int rank, SchedPlace last) {
  const SchedRow *row = &book->sched->row[rank];
  const SchedSpan *sim = book->sim->span + book->sim->first[rank];
  double since = book->ledger->begin, sim_since = 0;
  for (int i = 0; i < row->count; i++) {
    SchedPlace place = {rank, i};
    const SchedSpan *span = span_at(book, place);
    // What takes no time (posting a message, the marker of a pair) ends no gap: the action behind
    // it does.
    if (span->end <= span->start) continue;
    if (span->start > since) enter_gap(book, place, since, sim[i].start - sim_since);
    book->ledger->busy[rank] += positive(span->end - (span->start > since ? span->start : since));
    if (span->end > since) since = span->end;
    if (sim[i].end > sim_since) sim_since = sim[i].end;
  }
  book->ledger->idle[rank] = book->ledger->end - book->ledger->begin - book->ledger->busy[rank];
  if (book->ledger->end > since) enter_end(book, rank, since, last);
}

// ---- the whole -------------------------------------------------------------------------------

// begin and end of the step; the last compute action of all.
static Status find_ends(Book *book, SchedPlace *last) {
  Ledger *ledger = book->ledger;
  double latest = 0;
  bool is_first = true;
  *last = NOWHERE;
  for (int rank = 0; rank < ledger->ranks; rank++) {
    for (int i = 0; i < book->sched->row[rank].count; i++) {
      SchedPlace place = {rank, i};
      const SchedSpan *span = span_at(book, place);
      if (!(span->end >= span->start))
        return sched_fail(book->arena, ST_EVALUE, "rank %d, action %d: a span from %g to %g", rank,
                          i, span->start, span->end);
      bool is_compute = action_resource(action_at(book, place).kind) == USES_COMPUTE;
      if (span->end <= span->start) continue;
      if (is_first || span->start < ledger->begin) ledger->begin = span->start;
      if (is_first || span->end > ledger->end) ledger->end = span->end;
      if (is_compute && (last->rank < 0 || span->end > latest)) {
        latest = span->end;
        *last = place;
      }
      is_first = false;
    }
  }
  return ST_OK;
}

static void find_latest(Ledger *ledger) {
  ledger->latest = -1;
  for (int culprit = 0; culprit < ledger->ranks; culprit++) {
    double sum = 0;
    for (int victim = 0; victim < ledger->ranks; victim++)
      sum += ledger->late[victim * ledger->ranks + culprit];
    if (sum <= ledger->lateness) continue;
    ledger->lateness = sum;
    ledger->latest = culprit;
  }
}

static Status new_ledger(SchedArena *arena, Ledger **out, int ranks) {
  size_t n = (size_t)ranks;
  Ledger *ledger = sched_alloc(arena, 1, sizeof *ledger);
  if (!ledger) return ST_ENOMEM;
  ledger->ranks = ranks;
  ledger->busy = sched_alloc(arena, n, sizeof *ledger->busy);
  ledger->idle = sched_alloc(arena, n, sizeof *ledger->idle);
  ledger->cause = sched_alloc(arena, n * LEDGER_CAUSES, sizeof *ledger->cause);
  ledger->late = sched_alloc(arena, n * n, sizeof *ledger->late);
  ledger->link = sched_alloc(arena, n * n, sizeof *ledger->link);
  if (!ledger->busy || !ledger->idle || !ledger->cause || !ledger->late || !ledger->link)
    return ST_ENOMEM;
  *out = ledger;
  return ST_OK;
}

Status ledger_make(SchedArena *arena, Ledger **out, const Sched *sched, const int64_t *first,
                   const SchedSpan *span, const LedgerMessage *message) {
  Book book = {.arena = arena, .sched = sched, .first = first, .span = span, .message = message};
  SchedPlace at, other, last;
  int broken;
  if (!sched->lowered)
    return sched_fail(arena, ST_EVALUE, "schedule %s has no messages: a ledger is of a lowered one",
                      sched->name);
  TRY(new_ledger(arena, &book.ledger, sched->ranks));
  TRY(find_ends(&book, &last));
  TRY(sched_index(arena, &book.index, sched, &at, &other, &broken));
  if (broken)
    return sched_fail(arena, ST_EVALUE, "schedule %s breaks invariant %d", sched->name, broken);
  TRY(meet(&book));
  TRY(find_usual(&book));
  TRY(simulate_usual(&book));
  TRY(find_places(&book));
  for (int rank = 0; rank < sched->ranks; rank++) enter_rank(&book, rank, last);
  find_latest(book.ledger);
  *out = book.ledger;
  return ST_OK;
}

// ---- over steps ------------------------------------------------------------------------------

int ledger_watch(LedgerWatch *watch, const Ledger *ledger, int steps, double share) {
  double time = (ledger->end - ledger->begin) * ledger->ranks;
  double now = time > 0 ? ledger->lateness / time : 0;
  bool is_same = watch->steps > 0 && watch->rank == ledger->latest;
  if (ledger->latest < 0) {
    *watch = (LedgerWatch){.rank = -1};
    return -1;
  }
  watch->rank = ledger->latest;
  watch->share = is_same ? (watch->share * watch->steps + now) / (watch->steps + 1) : now;
  watch->steps = is_same ? watch->steps + 1 : 1;
  return watch->steps >= steps && watch->share >= share ? watch->rank : -1;
}

void ledger_print(const SchedOut *out, const Ledger *ledger) {
  double step = ledger->end - ledger->begin;
  sched_print(out, "%-9s %7s %7s", "", "busy", "idle");
  for (int c = 0; c < LEDGER_CAUSES; c++) sched_print(out, " %9s", ledger_cause((LedgerCause)c));
  sched_print(out, "\n");
  for (int rank = 0; rank < ledger->ranks; rank++) {
    SchedName busy, idle, own;
    sched_format(busy.text, sizeof busy.text, "%.1g%%", 100 * ledger->busy[rank] / step);
    sched_format(idle.text, sizeof idle.text, "%.1g%%", 100 * ledger->idle[rank] / step);
    sched_print(out, "rank %-4d %7s %7s", rank, busy.text, idle.text);
    for (int c = 0; c < LEDGER_CAUSES; c++) {
      double time = ledger->cause[rank * LEDGER_CAUSES + c];
      sched_format(own.text, sizeof own.text, "%.1g%%", 100 * time / step);
      sched_print(out, " %9s", own.text);
    }
    sched_print(out, "\n");
  }
  if (ledger->latest >= 0)
    sched_print(out, "the latest is rank %d: %.1g%% of the time of all ranks\n", ledger->latest,
                100 * ledger->lateness / (step * ledger->ranks));
}
