// The GPU of emulator.py: threads are fibers, one runs at a time, and every access is checked.
//
// Blocks run one after the other in a random order, each until it ends or waits in grid.sync().
// Within a block, between two barriers, warps run one after the other in a random order. So do the
// lanes of a warp between two of its shuffles.
// A kernel that relies on an order thus fails in some of the orders. Code that g++ compiled with
// -fsanitize=thread calls this file before each load and store; the sanitizer's library is not
// linked.

#include <dlfcn.h>
#include <link.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <vector>

#include "emulated.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulated {
alignas(1024) char dynamic_shared[MOST_SHARED];
}

extern "C" {
__attribute__((section("emulated_shared"), used)) static char emulated_any_shared[16];
extern char __start_emulated_shared[] __attribute__((visibility("hidden")));
extern char __stop_emulated_shared[] __attribute__((visibility("hidden")));
}

namespace emulated {
namespace {

constexpr unsigned THREADS = 1024;
constexpr size_t STACK = 256 * 1024;
constexpr uint64_t PATIENCE = 1ull << 28;  // accesses of a thread between two barriers

enum State { ready, meeting, waiting, gone };

struct Copy {
  void* to;
  const void* from;
  size_t bytes, zeros;
  unsigned group;
};

struct Fiber {
  State state;
  uint3 index;
  bool made;
  jmp_buf at;
  ucontext_t context;
  const char* what;  // the function it waits in
  int line;
  unsigned mask;
  uint64_t value;
  Lanes lanes;
  unsigned groups;
  std::vector<Copy> copies;
};

struct Stamp {  // the last thread that accessed a cell, and the epoch
  uint32_t epoch;
  uint16_t turn;
  uint16_t thread : 15, atomic : 1;
};

struct Cell {
  Stamp write, read, other;  // `other`: a read of another thread in the epoch of `read`
};

struct Region {
  char* base;
  size_t bytes, item, grain;  // of the tensor, an element, a cell
  const char* name;
  bool of_block;
  Cell* cells;
};

struct Overwritten {  // a cell that got another value in the same epoch
  char* at = nullptr;
  size_t bytes;
  char old[64];
  Stamp first;
  Region* region;
  void* site;
};

struct Image {
  char *first, *last;
};

struct Slot {  // a block that has begun: its threads, and while it waits, its shared memory
  Fiber fibers[THREADS];
  char* stacks;
  uint3 block;
  std::vector<char> fixed, dynamic;
};

std::vector<Slot*> slots;  // made once and used again by later launches
Fiber* fibers;             // of the running block
char* stacks;
Image image;
jmp_buf scheduler, launcher;
Fiber* current;
unsigned count;  // threads of a block
uint64_t random_state, accesses;
void (*kernel)(void**);
void** arguments;
std::vector<Region> regions;
bool races, anywhere, fenced, cooperative;
uint32_t epoch, block_start, grid_start;  // since the block began or resumed, and the grid
uint16_t turns[THREADS / 32];  // __syncwarp calls of each warp since the last barrier
Overwritten overwritten;
Votes votes;
char message[1024];
void* site;

uint64_t draw(uint64_t below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (random_state >> 11) % below;
}

void shuffle(unsigned* items, unsigned n) {
  for (unsigned i = n; i > 1; --i) std::swap(items[i - 1], items[draw(i)]);
}

unsigned thread_of(const Fiber* fiber) { return unsigned(fiber - fibers); }

const char* words(const Fiber& fiber) {
  static char texts[4][64];
  static unsigned next;
  char* text = texts[next++ % 4];
  snprintf(text, 64, "thread (%u, %u, %u)", fiber.index.x, fiber.index.y, fiber.index.z);
  return text;
}

// Races: two accesses of different threads with no barrier between, one of them a write.

bool ordered(const Stamp& then, const Region& region) {
  const unsigned me = thread_of(current);
  if (!then.epoch || then.epoch < grid_start) return true;  // `grid_start`: all blocks met
  if (then.thread == me && then.epoch >= block_start) return true;
  // A fence and an atomic are assumed to order blocks.
  if (then.epoch < block_start) return fenced || region.of_block;
  if (then.epoch < epoch) return true;
  return then.thread / 32 == me / 32 && then.turn < turns[me / 32];
}

[[noreturn]] void race(const Region& region, const char* at, const char* does, const char* did,
                       const Stamp& then, void* where) {
  site = where;
  const bool here = then.epoch >= block_start;
  fail("a race: it %s element %ld of %s, which %s%s %s, with no barrier between", does,
       long((at - region.base) / region.item), region.name,
       here ? words(fibers[then.thread]) : "a thread", here ? "" : " of another block", did);
}

void settle_overwritten() {
  if (!overwritten.at) return;
  char* at = overwritten.at;
  overwritten.at = nullptr;
  if (memcmp(at, overwritten.old, overwritten.bytes)) {
    race(*overwritten.region, at, "writes", "wrote", overwritten.first, overwritten.site);
  }
}

enum Kind { load, store, update, unordered };  // an update is atomic, unordered is volatile

// Check an access against the cell's last ones and record it; return whether another thread wrote.
bool touch_cell(const Region& region, Cell& cell, const char* at, Kind kind, void* where) {
  const unsigned me = thread_of(current);
  const Stamp now{epoch, turns[me / 32], uint16_t(me), kind == update}, last = cell.write;
  if (kind == load) {
    if (!ordered(last, region)) race(region, at, "reads", "wrote", last, where);
    if (cell.read.epoch == epoch && cell.read.thread != me) cell.other = cell.read;
    cell.read = now;
    return false;
  }
  for (const Stamp& then : {cell.read, cell.other}) {
    if (!ordered(then, region)) race(region, at, "writes", "read", then, where);
  }
  cell.write = now;
  if (ordered(last, region) || (last.atomic && kind == update)) return false;
  if (last.atomic || kind == update) race(region, at, "writes", "wrote", last, where);
  overwritten.first = last;
  return true;
}

void look_for_race(Region& region, char* at, size_t bytes, Kind kind, void* where) {
  char *first = nullptr, *last = nullptr;
  for (char* part = at; part < at + bytes; part += region.grain) {
    Cell& cell = region.cells[(part - region.base) / region.grain];
    if (!touch_cell(region, cell, part, kind, where)) continue;
    first = first ? first : part;
    last = std::min(part + region.grain, at + bytes);
  }
  if (!first) return;
  overwritten.at = first, overwritten.region = &region, overwritten.site = where;
  overwritten.bytes = std::min(size_t(last - first), sizeof(overwritten.old));
  memcpy(overwritten.old, first, overwritten.bytes);
}

bool within(const char* at, const char* base, size_t bytes) {
  return at >= base && at < base + bytes;
}

[[noreturn]] void outside(const char* at, const char* does) {
  const Region* nearest = nullptr;
  long least = LONG_MAX;
  for (const Region& region : regions) {
    const long gap = at < region.base ? region.base - at : at - region.base - region.bytes;
    if (gap < least) least = gap, nearest = &region;
  }
  const long item = nearest->item, offset = at - nearest->base;
  const long element = (offset < 0 ? offset - item + 1 : offset) / item;
  fail("%s element %ld of %s, which has %zu", does, element, nearest->name,
       nearest->bytes / item);
}

void touch(const void* address, size_t bytes, Kind kind, void* where, bool aligned) {
  if (!current) return;
  char* at = static_cast<char*>(const_cast<void*>(address));
  settle_overwritten();
  if (++accesses > PATIENCE) site = where, fail("spins: threads run one at a time here");
  if (within(at, stacks, THREADS * STACK)) return;
  if (within(at, reinterpret_cast<char*>(fibers), THREADS * sizeof(Fiber))) return;
  const char* does = kind == load ? "reads" : "writes";
  for (Region& region : regions) {
    if (!within(at, region.base, region.bytes)) continue;
    char* end = region.base + region.bytes;
    site = where;
    if (at + bytes > end) outside(end, does);
    if (aligned && uintptr_t(at) % bytes) fail("%s %zu bytes at %p: misaligned", does, bytes, at);
    if (races && kind != unordered) look_for_race(region, at, bytes, kind, where);
    site = nullptr;
    return;
  }
  const bool ours = at >= image.first && at < image.last;
  if (anywhere || (ours && !within(at, dynamic_shared, MOST_SHARED))) return;
  site = where;
  outside(at, does);
}

// Fibers.

__attribute__((noinline)) void leave() {
  settle_overwritten();
  if (!_setjmp(current->at)) _longjmp(scheduler, 1);
}

void body() {
  for (;;) {
    kernel(arguments);
    current->state = gone;
    leave();
  }
}

__attribute__((noinline)) void resume(Fiber& fiber) {
  current = &fiber;
  threadIdx = fiber.index;
  accesses = 0;
  if (_setjmp(scheduler)) {
    current = nullptr;
    return;
  }
  if (fiber.made) _longjmp(fiber.at, 1);
  fiber.made = true;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stacks + thread_of(&fiber) * STACK;
  fiber.context.uc_stack.ss_size = STACK;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, body, 0);
  setcontext(&fiber.context);
}

// Return whether all lanes that `first` waits for have arrived at the same call, and release them.
bool met(Fiber* warp, unsigned lanes, Fiber& first) {
  Lanes result{};
  for (unsigned lane = 0; lane < lanes; ++lane) {
    Fiber& other = warp[lane];
    if (!(first.mask >> lane & 1) || other.state == gone) continue;
    if (other.state != meeting) return false;
    if (other.mask != first.mask || other.what != first.what) return false;
    result.present |= 1u << lane;
    result.values[lane] = other.value;
  }
  for (unsigned lane = 0; lane < lanes; ++lane) {
    if (!(result.present >> lane & 1)) continue;
    warp[lane].lanes = result;
    warp[lane].state = ready;
  }
  if (!strcmp(first.what, "__syncwarp")) ++turns[thread_of(warp) / 32];
  return true;
}

void run_warp(unsigned number) {
  Fiber* warp = fibers + number * 32;
  const unsigned lanes = std::min(32u, count - number * 32);
  unsigned order[32];
  for (unsigned lane = 0; lane < lanes; ++lane) order[lane] = lane;
  for (bool again = true; again;) {
    shuffle(order, lanes);
    for (unsigned i = 0; i < lanes; ++i) {
      if (warp[order[i]].state == ready) resume(warp[order[i]]);
    }
    again = false;
    for (unsigned lane = 0; lane < lanes; ++lane) {
      if (warp[lane].state == meeting) again |= met(warp, lanes, warp[lane]);
    }
  }
}

bool same(const Fiber& a, const Fiber& b) {
  return a.state == b.state && a.what == b.what && a.line == b.line && a.mask == b.mask;
}

// Release all threads that wait at the barrier; return one of them, or null if none is left.
const Fiber* pass_barrier() {
  const Fiber* first = nullptr;
  votes = {0, 1, 0};
  for (unsigned thread = 0; thread < count; ++thread) {
    const Fiber& fiber = fibers[thread];
    if (fiber.state == gone) continue;
    if (!first) first = &fiber;
    if (!same(fiber, *first)) {
      fail("a deadlock: %s waits in %s of line %d with mask %08x, %s in %s of line %d with %08x",
           words(*first), first->what, first->line, first->mask, words(fiber), fiber.what,
           fiber.line, fiber.mask);
    }
    votes.count += fiber.value != 0, votes.every &= fiber.value != 0, votes.any |= fiber.value != 0;
  }
  for (unsigned thread = 0; thread < count; ++thread) {
    if (fibers[thread].state == waiting) fibers[thread].state = ready;
  }
  return first;
}

void new_epoch() {
  ++epoch;
  memset(turns, 0, sizeof(turns));
}

constexpr char GRID_SYNC[] = "grid.sync";

void begin_block(size_t shared) {
  memset(__start_emulated_shared, 0xff, __stop_emulated_shared - __start_emulated_shared);
  memset(dynamic_shared, 0xff, shared);
  for (unsigned thread = 0; thread < count; ++thread) {
    Fiber& fiber = fibers[thread];
    fiber.state = ready;
    fiber.index = {thread % blockDim.x, thread / blockDim.x % blockDim.y,
                   thread / blockDim.x / blockDim.y};
    fiber.what = nullptr, fiber.line = 0, fiber.mask = ~0u, fiber.groups = 0;
    fiber.copies.clear();
  }
}

// Return whether all threads of the block wait in grid.sync(). If not, all have ended.
bool run_block() {
  new_epoch();
  block_start = epoch;
  unsigned order[THREADS / 32];
  const unsigned warps = (count + 31) / 32;
  for (unsigned warp = 0; warp < warps; ++warp) order[warp] = warp;
  do {
    shuffle(order, warps);
    for (unsigned i = 0; i < warps; ++i) run_warp(order[i]);
    const Fiber* released = pass_barrier();
    if (!released) return false;
    new_epoch();
    if (released->what == GRID_SYNC) return true;
  } while (true);
}

int find_image(dl_phdr_info* info, size_t, void*) {
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    char* base = reinterpret_cast<char*>(info->dlpi_addr + part.p_vaddr);
    if (part.p_type != PT_LOAD || !(part.p_flags & PF_W)) continue;
    if (within(dynamic_shared, base, part.p_memsz)) image = {base, base + part.p_memsz};
  }
  return 0;
}

void use(size_t number) {
  if (number == slots.size()) {
    slots.push_back(new Slot());
    void* made = mmap(nullptr, THREADS * STACK, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) abort();
    slots.back()->stacks = static_cast<char*>(made);
  }
  fibers = slots[number]->fibers, stacks = slots[number]->stacks;
}

void prepare() {
  use(0);
  if (!image.first) dl_iterate_phdr(find_image, nullptr);
}

void suspend(Slot& slot, size_t shared) {
  slot.block = blockIdx;
  slot.fixed.assign(__start_emulated_shared, __stop_emulated_shared);
  slot.dynamic.assign(dynamic_shared, dynamic_shared + shared);
}

bool resume_block(Slot& slot) {
  blockIdx = slot.block;
  std::copy(slot.fixed.begin(), slot.fixed.end(), __start_emulated_shared);
  std::copy(slot.dynamic.begin(), slot.dynamic.end(), dynamic_shared);
  return run_block();
}

// Blocks run one after the other, each until it ends or waits for the grid.
void run_grid(size_t shared, size_t blocks) {
  std::vector<unsigned> order(blocks);
  for (unsigned block = 0; block < blocks; ++block) order[block] = block;
  shuffle(order.data(), unsigned(blocks));
  unsigned waiting = 0;
  for (unsigned block : order) {
    use(waiting);
    blockIdx = {block % gridDim.x, block / gridDim.x % gridDim.y, block / gridDim.x / gridDim.y};
    begin_block(shared);
    if (run_block()) suspend(*slots[waiting++], shared);
  }
  while (waiting) {
    if (waiting < blocks) {
      fail("a deadlock: %u of %u blocks wait in grid.sync, and the others have ended", waiting,
           unsigned(blocks));
    }
    grid_start = epoch + 1;
    waiting = 0;
    shuffle(order.data(), unsigned(blocks));
    for (unsigned number : order) {
      use(number);
      if (!resume_block(*slots[number])) continue;
      suspend(*slots[number], shared);
      ++waiting;
    }
  }
}

}  // namespace

void fail(const char* form, ...) {
  va_list given;
  va_start(given, form);
  int used = snprintf(message, sizeof(message), "block (%u, %u, %u)", blockIdx.x, blockIdx.y,
                      blockIdx.z);
  const char* who = current ? words(*current) : nullptr;
  used += snprintf(message + used, sizeof(message) - used, who ? ", %s " : ": ", who);
  vsnprintf(message + used, sizeof(message) - used, form, given);
  va_end(given);
  _longjmp(launcher, 1);
}

unsigned lane() { return thread_of(current) % 32; }

unsigned alive() {
  unsigned found = 0;
  const unsigned first = thread_of(current) / 32 * 32;
  for (unsigned at = 0; at < 32 && first + at < count; ++at) {
    found |= unsigned(fibers[first + at].state != gone) << at;
  }
  return found;
}

void fence() { fenced = true; }

void atomic(const void* at, size_t bytes) {
  touch(at, bytes, update, __builtin_return_address(0), true);
}

Votes barrier(const char* what, int vote, int line) {
  current->what = what, current->line = line, current->value = vote, current->mask = ~0u;
  current->state = waiting;
  leave();
  return votes;
}

void grid_barrier(int line) {
  if (!cooperative) fail("calls grid.sync of line %d, but the launch is not cooperative", line);
  barrier(GRID_SYNC, 0, line);
}

const Lanes& meet(const char* what, unsigned mask, uint64_t value, int line) {
  if (!(mask >> lane() & 1)) fail("calls %s of line %d, but mask %08x lacks it", what, line, mask);
  current->what = what, current->line = line, current->value = value, current->mask = mask;
  current->state = meeting;
  leave();
  return current->lanes;
}

void copy_later(void* to, const void* from, size_t bytes, size_t zeros) {
  void* where = __builtin_return_address(0);
  const bool legal = bytes == 4 || bytes == 8 || bytes == 16;
  if (!legal) fail("copies %zu bytes; legal are 4, 8 and 16", bytes);
  if (bytes > zeros) touch(from, bytes - zeros, load, where, !zeros);
  touch(to, bytes, store, where, true);
  settle_overwritten();
  memset(to, 0xff, bytes);
  current->copies.push_back({to, from, bytes, zeros, current->groups});
}

void commit_copies() { ++current->groups; }

void wait_copies(unsigned but) {
  std::vector<Copy> later;
  for (const Copy& copy : current->copies) {
    if (copy.group + but >= current->groups) {
      later.push_back(copy);
      continue;
    }
    touch(copy.to, copy.bytes, store, __builtin_return_address(0), true);
    memset(copy.to, 0, copy.bytes);
    memcpy(copy.to, copy.from, copy.bytes - copy.zeros);
  }
  current->copies = later;
}

}  // namespace emulated

// Functions that emulator.py calls.

using namespace emulated;

struct Given {
  char* base;
  size_t bytes, item;
  const char* name;
};

extern "C" const char* emulate(void (*call)(void**), void** args, const unsigned* geometry,
                               size_t shared, uint64_t seed, const Given* given, int tensors,
                               int look_for_races, int indirect, int at_once) {
  prepare();
  kernel = call, arguments = args;
  gridDim = dim3(geometry[0], geometry[1], geometry[2]);
  blockDim = dim3(geometry[3], geometry[4], geometry[5]);
  count = blockDim.x * blockDim.y * blockDim.z;
  random_state = seed * 0x9e3779b97f4a7c15 + 0x1234567;
  races = look_for_races, anywhere = indirect, fenced = false, site = nullptr;
  cooperative = at_once;
  epoch = grid_start = 0;
  regions.clear();
  for (int i = 0; i < tensors; ++i) {
    const auto& [base, bytes, item, name] = given[i];
    regions.push_back({base, bytes, item, std::min<size_t>(item, 4), name, false, nullptr});
  }
  const size_t size = __stop_emulated_shared - __start_emulated_shared;
  const char* words = "the shared memory (bytes)";
  regions.push_back({__start_emulated_shared, size, 1, 1, words, true, nullptr});
  words = "the dynamic shared memory (bytes)";
  regions.push_back({dynamic_shared, shared, 1, 1, words, true, nullptr});
  for (Region& region : regions) {
    const size_t cells = region.bytes / region.grain + 1;
    if (races) region.cells = static_cast<Cell*>(calloc(cells, sizeof(Cell)));
  }
  message[0] = 0;
  if (_setjmp(launcher)) {
    for (Slot* slot : slots) {
      for (Fiber& fiber : slot->fibers) fiber.made = false;  // they stopped midway
    }
    overwritten.at = nullptr;
  } else {
    run_grid(shared, size_t(gridDim.x) * gridDim.y * gridDim.z);
  }
  current = nullptr;
  for (Region& region : regions) free(region.cells);
  return message[0] ? message : nullptr;
}

extern "C" size_t emulated_site() {
  Dl_info found;
  if (!site || !dladdr(site, &found)) return 0;
  return static_cast<char*>(site) - static_cast<char*>(found.dli_fbase) - 1;
}

#define HOOK(bytes)                                                                             \
  extern "C" void __tsan_read##bytes(void* at) {                                                \
    touch(at, bytes, load, __builtin_return_address(0), true);                                  \
  }                                                                                             \
  extern "C" void __tsan_write##bytes(void* at) {                                               \
    touch(at, bytes, store, __builtin_return_address(0), true);                                 \
  }                                                                                             \
  extern "C" void __tsan_unaligned_read##bytes(void* at) {                                      \
    touch(at, bytes, load, __builtin_return_address(0), false);                                 \
  }                                                                                             \
  extern "C" void __tsan_unaligned_write##bytes(void* at) {                                     \
    touch(at, bytes, store, __builtin_return_address(0), false);                                \
  }                                                                                             \
  extern "C" void __tsan_volatile_read##bytes(void* at) {                                       \
    touch(at, bytes, unordered, __builtin_return_address(0), true);                       \
  }                                                                                             \
  extern "C" void __tsan_volatile_write##bytes(void* at) {                                      \
    touch(at, bytes, unordered, __builtin_return_address(0), true);                       \
  }                                                                                             \
  extern "C" void __tsan_unaligned_volatile_read##bytes(void* at) {                             \
    touch(at, bytes, unordered, __builtin_return_address(0), false);                      \
  }                                                                                             \
  extern "C" void __tsan_unaligned_volatile_write##bytes(void* at) {                            \
    touch(at, bytes, unordered, __builtin_return_address(0), false);                      \
  }
HOOK(1)
HOOK(2)
HOOK(4)
HOOK(8)
HOOK(16)
extern "C" void __tsan_read_range(void* at, size_t bytes) {
  touch(at, bytes, load, __builtin_return_address(0), false);
}
extern "C" void __tsan_write_range(void* at, size_t bytes) {
  touch(at, bytes, store, __builtin_return_address(0), false);
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}
