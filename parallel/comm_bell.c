// comm_bell - a rank that waits where ranks outnumber cores sleeps until a message is there.
//
// Each rank has a page that the others of its node map (the one with what it is doing). On it is a
// bell: a number that whoever sends it something counts up, and then wakes the sleeper if there is
// one. So waiting takes no time from those who work, and ends some microseconds after the message;
// but while a message of more than 2 KiB is awaited or under way, ranks nap for some 50 us at a
// time and look, for MPI moves it on only where somebody looks.
//
//     waits:  seen = bell; look; look again; asleep = 1; futex sleeps unless bell != seen
//     sends:  the message; bell += 1; if (asleep) futex wakes
//
// A bell that is rung between the look and the sleep has another number than was seen: no message
// is slept through. What moves on without being sent anew (pieces of a long message) rings nothing:
// meanwhile naps are short. Ranks sleep only if each can ring every other: all of them are on one
// node, and see each other's pages.
#include "parallel/comm_impl.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const char PAGE_NAME[] = "rille-doing";

int comm_page_open(const CommPlace *place, int flags) {
  char path[64], name[64];
  if (place->row < 0) return -1;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", place->pid, place->row);
  ssize_t n = readlink(path, name, sizeof name - 1);
  if (n < 0) return -1;
  name[n] = 0;
  return strstr(name, PAGE_NAME) ? open(path, flags | O_CLOEXEC) : -1;
}

static CommPage *map_page(int file, int64_t at) {
  void *page = mmap(NULL, COMM_WORDS_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, (off_t)at);
  return page == MAP_FAILED ? NULL : page;
}

CommPage *comm_page_share(int rank, int *row, int64_t *at) {
  const char *path = getenv("RILLE_DOING"); // of `rille -n`, which reads it when this rank is gone
  *at = (int64_t)rank * COMM_WORDS_PAGE;
  int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (file < 0) {
    *at = 0;
    file = memfd_create(PAGE_NAME, MFD_CLOEXEC);
    if (file >= 0 && ftruncate(file, COMM_WORDS_PAGE) != 0) {
      close(file);
      file = -1;
    }
  }
  CommPage *page = file < 0 ? NULL : map_page(file, *at);
  if (!page && file >= 0) close(file);
  *row = page ? file : -1;
  return page;
}

// Maps the pages of all ranks. False: one is elsewhere, or cannot be seen.
static bool map_pages(CommProcess *p) {
  int size = p->world->size;
  p->page = calloc((size_t)size, sizeof *p->page);
  for (int rank = 0; p->page && rank < size; rank++) {
    const CommPlace *place = &p->place[rank];
    int file = place->node_index == 0 ? comm_page_open(place, O_RDWR) : -1;
    if (file >= 0) {
      p->page[rank] = map_page(file, place->row_at);
      close(file);
    }
    if (!p->page[rank]) return false;
  }
  return p->page != NULL;
}

Status comm_bells_hang(void) {
  CommProcess *p = comm_process();
  int64_t can = p->shares_cores && map_pages(p);
  TRY(comm_all_min(p->world, &can));
  p->has_bells = can;
  return ST_OK;
}

void comm_ring(const Comm *comm, int peer) {
  const CommProcess *p = comm_process();
  if (!p->has_bells) return;
  CommPage *page = p->page[comm->member[peer]];
  atomic_fetch_add(&page->bell, 1);
  if (atomic_load(&page->is_asleep)) syscall(SYS_futex, &page->bell, FUTEX_WAKE, 1, NULL, NULL, 0);
}

bool comm_sleep(double at_most) {
  CommProcess *p = comm_process();
  if (!p->has_bells) return false;
  const CommVtable *transport = p->world->vtable;
  if (transport->needs_looks && transport->needs_looks(p->world)) return false;
  CommPage *page = p->page[p->world->rank];
  uint32_t bell = atomic_load(&page->bell);
  if (bell != p->life.heard_bell) { // two looks after each ring: the first may only begin something
    p->life.heard_bell = bell;
    return true;
  }
  struct timespec limit = {(time_t)at_most, (long)((at_most - (double)(time_t)at_most) * 1e9)};
  atomic_store(&page->is_asleep, 1);
  syscall(SYS_futex, &page->bell, FUTEX_WAIT, bell, &limit, NULL, 0);
  atomic_store(&page->is_asleep, 0);
  return true;
}
