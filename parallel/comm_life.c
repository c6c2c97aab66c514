// comm_life - signs of life, what a waiting rank may conclude, and how a job ends.
//
// A rank works, or waits. Work beats: a poll between kernels, an action, a message that is done. A
// rank that waits asks its peer now and then; the answer, sent from wherever the peer polls, says
// how long ago anybody in the chain of ranks that it waits for has worked:
//
//     rank 2 --waits for--> rank 1 --waits for--> rank 0 (works: 0.1 s ago)
//        age 0.1 s  <-------   age 0.1 s  <------- answer
//
// So a rank may wait for hours behind one that works; a rank that is stopped or loops, and ranks
// that wait for each other in a ring, grow old, and the first that waits for them longer than the
// time-out ends the job. If all ranks are silent, nobody waits, and their watchdogs end them. A
// rank that has left the script answers so until all have left.
//
// A failing rank tells all others, looks for a moment whether others fail too, reports, and aborts.
// A rank that was told before it failed itself is a victim and keeps silent.
#include "parallel/comm_impl.h"

#include "core/hash.h"
#include "core/spans.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

static const double FIRST_QUESTION = 0.2; // seconds of waiting
static const double LEFT_GRACE = 0.5;     // what a rank sent before it left may still be under way
static const double FAIL_WINDOW = 2.0;    // ranks fail "at the same time"; less if all answer
static const double SILENT_AFTER = 0.4;   // who waits this long for one that fails is a victim
static const double STOPPED_AFTER = 1.0;  // who waits looks more often, unless it is stopped
static const double END_WITHIN = 8.0;     // a job that does not end by itself is ended
static const double ABORT_WITHIN = 1.5;   // an MPI that hangs in its abort is left alone
enum { MAX_REPORTS = 2 };                 // of ranks that fail at the same time in other words

static double question_every(void) {
  double every = comm_process()->life.timeout / 8;
  return every < 0.5 ? every : 0.5;
}

static void sleep_for(double seconds) {
  struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
  nanosleep(&t, NULL);
}

static void copy_words(char to[WORDS], const char *from) {
  size_t length = strnlen(from, WORDS - 1);
  memcpy(to, from, length);
  to[length] = 0;
}

// ---- work ------------------------------------------------------------------------------------

void comm_beat(void) {
  CommLife *life = &comm_process()->life;
  atomic_store_explicit(&life->beat, clock_now(), memory_order_relaxed);
  atomic_store_explicit(&life->is_waiting, false, memory_order_relaxed);
}

void comm_doing(const char *what) {
  CommLife *life = &comm_process()->life;
  pthread_mutex_lock(&life->lock);
  copy_words(life->doing, what);
  pthread_mutex_unlock(&life->lock);
  comm_beat();
}

void comm_coordinates(const char *words) {
  CommLife *life = &comm_process()->life;
  pthread_mutex_lock(&life->lock);
  copy_words(life->coordinates, words);
  pthread_mutex_unlock(&life->lock);
}

double comm_stall_timeout(double seconds) {
  if (seconds > 0) comm_process()->life.timeout = seconds;
  return comm_process()->life.timeout;
}

// ---- last words: on a page of its own, which others on the node find through /proc. So it can be
// said what a rank was doing that has been stopped and cannot answer.

static void share_words(CommLife *life) {
  CommPage *page = comm_page_share(comm_process()->launch.rank, &life->row, &life->row_at);
  if (!page) return;
  memcpy(page->doing, life->doing, WORDS);
  life->doing = page->doing;
}

// The last words of a rank on this node; "" if there are none.
static const char *last_words(int rank, char words[WORDS]) {
  const CommProcess *p = comm_process();
  const CommPlace *place = &p->place[rank];
  bool is_near = place->node_index == p->place[p->world->rank].node_index;
  int file = is_near ? comm_page_open(place, O_RDONLY) : -1;
  words[0] = 0;
  if (file < 0) return words;
  ssize_t n = pread(file, words, WORDS - 1, place->row_at);
  words[n > 0 ? n : 0] = 0;
  close(file);
  return words;
}

// ---- notices ---------------------------------------------------------------------------------

static void answer(int to, double now) {
  CommProcess *p = comm_process();
  CommLife *life = &p->life;
  double beat = life->beat;
  CommNotice notice = {.kind = p->has_left ? NOTICE_LEFT : NOTICE_ALIVE,
                       .code = p->exit_code,
                       .waits_for = -1,
                       .root = -1};
  if (life->is_waiting) {
    if (life->chain_beat > beat) beat = life->chain_beat;
    notice.waits_for = life->waits_for;
    notice.root = life->root;
    copy_words(notice.root_doing, life->root_doing);
  }
  copy_words(notice.doing, life->is_waiting ? life->waiting_for : life->doing);
  notice.age = now - beat;
  comm_say(to, &notice);
}

void comm_notice(int from, const CommNotice *notice) {
  CommProcess *p = comm_process();
  CommPeer *peer = &p->peer[from];
  double now = clock_now();
  switch (notice->kind) {
  case NOTICE_ASK: answer(from, now); break;
  case NOTICE_LEFT:
    if (peer->left_at == 0) peer->left_at = now;
    // fall through
  case NOTICE_ALIVE:
    peer->heard_at = now;
    peer->said = *notice;
    break;
  case NOTICE_FAILING:
  case NOTICE_VICTIM:
    peer->is_failing = true;
    peer->is_victim = notice->kind == NOTICE_VICTIM;
    peer->failing_words = notice->hash;
    if (p->somebody_fails == 0) p->somebody_fails = now;
    break;
  }
}

// ---- waiting ---------------------------------------------------------------------------------

static void tell_all(const CommNotice *notice) {
  const Comm *world = comm_process()->world;
  for (int i = 0; i < world->size; i++)
    if (i != world->rank) comm_say(i, notice);
}

// Another rank has the word: this one waits for the end.
static void be_silent(uint64_t words) {
  comm_process()->life.is_ending = true;
  CommNotice notice = {.kind = NOTICE_VICTIM, .hash = words};
  tell_all(&notice);
  double since = clock_now();
  while (clock_now() - since < END_WITHIN) {
    comm_listen();
    sleep_for(1e-3);
  }
  comm_abort(1);
}

// When the end of the chain behind a peer last worked, on this rank's clock.
static double peer_beat(const CommPeer *peer, double since) {
  double beat = peer->heard_at > 0 ? peer->heard_at - peer->said.age : since;
  return beat > since ? beat : since;
}

static bool peer_waits(const CommPeer *peer) {
  return peer->heard_at > 0 && peer->said.kind == NOTICE_ALIVE && peer->said.waits_for >= 0;
}

static Status fail_left(int rank, const CommPeer *peer, const char *what) {
  Status status =
      fail(ST_ECOMM, "rank %d has left the script with exit code %d, and %s waits for it", rank,
           peer->said.code, what);
  return fail_hint(status, "every rank must take every step: no rank may end early by itself");
}

static Status fail_stalled(int rank, const CommPeer *peer, const char *what, double now,
                           double since) {
  double age = now - peer_beat(peer, since);
  char words[WORDS];
  const char *doing = peer_waits(peer) ? peer->said.doing : last_words(rank, words);
  if (!doing[0] && peer->heard_at > 0) doing = peer->said.doing;
  bool answers = peer->heard_at > 0 && now - peer->heard_at < 4 * question_every();
  Status status = fail(ST_ECOMM, "rank %d has %s for %.1f s%s%s, and %s waits for it", rank,
                       answers ? "done no work" : "given no sign of life", age,
                       !doing[0]          ? ""
                       : peer_waits(peer) ? ", waiting itself in "
                                          : ", last in ",
                       doing, what);
  return fail_hint(status, "what may take longer needs a longer --stall-timeout (seconds, now %g)",
                   comm_process()->life.timeout);
}

// Asks the rank again when it is time.
static void ask(int rank, double now) {
  CommProcess *p = comm_process();
  CommPeer *peer = &p->peer[rank];
  if (now - peer->asked_at < question_every()) return;
  peer->asked_at = now;
  CommNotice question = {.kind = NOTICE_ASK, .waits_for = -1, .root = -1};
  comm_say(rank, &question);
}

// Asks, and judges by what was heard. A peer that waits itself is left for a while to the judgement
// of those who wait for its peer: they can name the cause.
static Status judge(Comm *comm, int first, int last, const char *what, double now, double since) {
  CommProcess *p = comm_process();
  CommLife *life = &p->life;
  int oldest = -1;
  double youngest_beat = 0, oldest_beat = 0;
  if (since < life->resumed_at) since = life->resumed_at; // maybe all ranks were stopped
  for (int i = first; i <= last; i++) {
    int rank = comm->member[i];
    if (i == comm->rank) continue;
    CommPeer *peer = &p->peer[rank];
    ask(rank, now);
    if (peer->left_at > 0 && !p->has_left && now - peer->left_at > LEFT_GRACE)
      return comm_lose(fail_left(rank, peer, what));
    double beat = peer_beat(peer, since);
    if (beat > youngest_beat) youngest_beat = beat;
    if (oldest < 0 || (!peer_waits(peer) && beat < oldest_beat)) {
      oldest = rank;
      oldest_beat = beat;
    }
  }
  if (oldest < 0) return ST_OK;
  const CommPeer *peer = &p->peer[oldest];
  if (peer->heard_at > 0 && peer->heard_at - peer->said.age > life->chain_beat)
    life->chain_beat = peer->heard_at - peer->said.age;
  bool behind = peer_waits(peer) && peer->said.root >= 0;
  life->root = behind ? peer->said.root : oldest;
  copy_words(life->root_doing, behind                 ? peer->said.root_doing
                               : peer->heard_at > 0.0 ? peer->said.doing
                                                      : "");
  double limit = life->timeout + question_every();
  if (peer_waits(peer)) limit += 1.0 + 0.25 * life->timeout;
  if (now - youngest_beat <= limit) return ST_OK;
  return comm_lose(fail_stalled(oldest, peer, what, now, since));
}

// A rank with a core of its own looks all the time, but for very long waits. Where cores are shared
// it sleeps until it is rung, else in short naps up to the length of a slow action, since what they
// add to each hop adds up along a pipeline, then in longer ones. It does not yield: a kernel may
// take that for a wish to run again only when all others have had their turn, of milliseconds.
static void give_way(double waited) {
  bool is_long = waited > 0.1;
  if (!comm_process()->shares_cores) {
    if (is_long) sleep_for(1e-4);
  } else if (!comm_sleep(is_long ? 1e-2 : 1e-3)) {
    sleep_for(is_long ? 1e-3 : 5e-5);
  }
}

Status comm_waiting(Comm *comm, int peer, const char *what, double since) {
  CommProcess *p = comm_process();
  CommLife *life = &p->life;
  comm_progress();
  double now = clock_now();
  int waits_for = peer < 0 ? -1 : comm->member[peer];
  if (!life->is_waiting || life->waits_for != waits_for) {
    pthread_mutex_lock(&life->lock);
    copy_words(life->waiting_for, what);
    pthread_mutex_unlock(&life->lock);
    life->waits_for = waits_for;
    life->chain_beat = 0;
    life->root = -1;
    life->root_doing[0] = 0;
    life->is_waiting = true;
  } else if (now - life->turn > STOPPED_AFTER) {
    life->resumed_at = now;
  }
  atomic_store_explicit(&life->turn, now, memory_order_relaxed);
  give_way(now - since);
  if (p->somebody_fails > 0) { // what is about to arrive may show that this rank fails likewise
    if (now - p->somebody_fails > SILENT_AFTER) be_silent(0);
    return ST_OK;
  }
  if (now - since < FIRST_QUESTION) return ST_OK;
  return peer < 0 ? judge(comm, 0, comm->size - 1, what, now, since)
                  : judge(comm, peer, peer, what, now, since);
}

// ---- the end ---------------------------------------------------------------------------------

// "rank 3 of 8 (node b, pp 1 dp 0), in 2F0" into a caller's buffer.
static const char *describe_self(char *buffer, size_t size) {
  CommProcess *p = comm_process();
  CommLife *life = &p->life;
  pthread_mutex_lock(&life->lock);
  snprintf(buffer, size, "rank %d of %d (node %s%s%s)%s%s", p->world->rank, p->world->size,
           p->place[p->world->rank].node, life->coordinates[0] ? ", " : "", life->coordinates,
           life->doing[0] ? ", in " : "", life->doing);
  pthread_mutex_unlock(&life->lock);
  return buffer;
}

static void report(const char *words, int n_same) {
  const CommProcess *p = comm_process();
  char who[256];
  fflush(stdout);
  if (n_same + 1 == p->world->size)
    fprintf(stderr, "rille: %s\n    on all %d ranks\n", words, p->world->size);
  else if (n_same > 0)
    fprintf(stderr, "rille: %s, and %d other rank%s: %s\n", describe_self(who, sizeof who), n_same,
            n_same == 1 ? "" : "s", words);
  else
    fprintf(stderr, "rille: %s: %s\n", describe_self(who, sizeof who), words);
  fflush(stderr);
}

// Looks for a moment who else fails. Returns the number of ranks that fail in the same words; -1:
// another rank reports.
static int look_around(uint64_t words) {
  const CommProcess *p = comm_process();
  double since = clock_now();
  int n_failing = 0;
  while (clock_now() - since < FAIL_WINDOW && n_failing < p->world->size - 1) {
    comm_listen();
    n_failing = 0;
    for (int i = 0; i < p->world->size; i++) n_failing += p->peer[i].is_failing;
    sleep_for(1e-3);
  }
  int n_same = 0, n_before = 0;
  for (int i = 0; i < p->world->size; i++) {
    const CommPeer *peer = &p->peer[i];
    if (!peer->is_failing) continue;
    bool is_same = peer->failing_words == words;
    n_same += is_same;
    if (i < p->world->rank && !peer->is_victim && (is_same || ++n_before >= MAX_REPORTS)) return -1;
  }
  return n_same;
}

void comm_fatal_words(const char *words, int code) {
  CommProcess *p = comm_process();
  if (!p->world || p->world->size == 1 || p->life.is_ending) return;
  p->life.is_ending = true;
  comm_lose(fail(ST_ESTATE, "the job is about to end")); // what unwinds frees its buffers
  comm_listen();
  CommNotice notice = {.kind = NOTICE_FAILING, .hash = hash_string(words, 0)};
  if (p->somebody_fails > 0) be_silent(notice.hash);
  tell_all(&notice);
  int n_same = look_around(notice.hash);
  if (n_same < 0) be_silent(notice.hash);
  report(words, n_same);
  for (int i = 0; i < p->world->size; i++) // with the code of the rank that ended first
    if (code == 1 && p->peer[i].left_at > 0 && p->peer[i].said.code != 0)
      code = p->peer[i].said.code;
  launch_tell(code);
  sleep_for(0.05); // what the launcher forwards is to arrive before the end does
  comm_abort(code);
}

void comm_fatal(Comm *comm, int code) {
  (void)comm;
  char words[3200];
  snprintf(words, sizeof words, "%s%s%s", status_message(), status_hint()[0] ? "\n    hint: " : "",
           status_hint());
  comm_fatal_words(words, code);
}

// ---- the watchdog ----------------------------------------------------------------------------

// How long after the time-out a silent rank is left to the judgement of those who wait for it: they
// see more. If all ranks are silent, nobody waits.
static double grace(double timeout) {
  double grace = 2 + timeout / 2;
  return grace < 5 ? grace : 5;
}

// The main thread is silent, and nobody ended the job.
static void end_silent(double silent) {
  char who[256];
  fprintf(stderr,
          "rille: %s: no sign of life for %.1f s: the job ends\n"
          "    hint: what may take longer needs a longer --stall-timeout (seconds, now %g)\n",
          describe_self(who, sizeof who), silent, comm_process()->life.timeout);
  launch_tell(1);
  _exit(1);
}

// Says where the main thread hangs, and ends a process that cannot end by itself. Without MPI.
static void *watch(void *nothing) {
  (void)nothing;
  CommProcess *p = comm_process();
  CommLife *life = &p->life;
  bool has_said = false;
  double looked_at = clock_now();
  pthread_mutex_lock(&life->lock);
  while (life->has_watchdog) {
    double timeout = life->timeout, every = timeout / 10 < 1 ? timeout / 10 : 1;
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    at.tv_nsec += (long)(every * 1e9);
    at.tv_sec += at.tv_nsec / 1000000000;
    at.tv_nsec %= 1000000000;
    if (pthread_cond_timedwait(&life->ending, &life->lock, &at) != ETIMEDOUT) continue;
    double beat = life->beat, now = clock_now();
    if (life->is_waiting && life->turn > beat) beat = life->turn;
    if (now - looked_at > 2 * every + 1) life->beat = beat = now; // the process was stopped
    looked_at = now;
    double silent = now - beat;
    if (life->abort_at > 0 && now - life->abort_at > ABORT_WITHIN) _exit(life->abort_code);
    if (silent < timeout) has_said = false;
    if (silent < timeout || life->is_ending) continue;
    bool ends = p->world->size > 1 && silent > timeout + grace(timeout);
    if (has_said && !ends) continue;
    has_said = true;
    pthread_mutex_unlock(&life->lock);
    if (ends) end_silent(silent);
    char who[256];
    fprintf(stderr, "rille: %s: no sign of life for %.1f s\n", describe_self(who, sizeof who),
            silent);
    pthread_mutex_lock(&life->lock);
  }
  pthread_mutex_unlock(&life->lock);
  return NULL;
}

void comm_life_begin(void) {
  CommLife *life = &comm_process()->life;
  comm_beat();
  if (comm_process()->shares_cores) prctl(PR_SET_TIMERSLACK, 1000); // ns; else sleeps are long
  life->waits_for = -1;
  share_words(life);
  life->has_watchdog = true;
  pthread_cond_init(&life->ending, NULL);
  sigset_t all, before; // signals are for the main thread
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  if (pthread_create(&life->watchdog, NULL, watch, NULL) != 0) life->has_watchdog = false;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void comm_life_end(void) {
  CommLife *life = &comm_process()->life;
  if (!life->has_watchdog) return;
  pthread_mutex_lock(&life->lock);
  life->has_watchdog = false;
  pthread_cond_signal(&life->ending);
  pthread_mutex_unlock(&life->lock);
  pthread_join(life->watchdog, NULL);
}
