// The memory of the GPUs, as address space of the host, and pinned host memory.

#include "machine.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include <sys/mman.h>

namespace sim {

// One range of addresses for all GPUs, so that one protection key covers it. Segments are kept.
struct Arena {
  static constexpr size_t size = size_t{1} << 38;
  char* next = nullptr;
  int key = -1;
  std::mutex mutex;

  Arena() {
    void* all = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) abort();
    next = static_cast<char*>(all);
    key = pkey_alloc(0, PKEY_DISABLE_ACCESS);
    if (key >= 0 && pkey_mprotect(all, size, PROT_READ | PROT_WRITE, key) != 0) abort();
  }
};

static Arena& arena() {
  static auto* made = new Arena;
  return *made;
}

char* take_segment(size_t size) {
  std::lock_guard<std::mutex> lock(arena().mutex);
  char* segment = arena().next;
  arena().next += size;
  return segment;
}

static thread_local int accesses = 0;
Access::Access() {
  if (accesses++ == 0 && arena().key >= 0) pkey_set(arena().key, 0);
}
Access::~Access() {
  if (--accesses == 0 && arena().key >= 0) pkey_set(arena().key, PKEY_DISABLE_ACCESS);
}

void poison(void* pointer, size_t size) {
  if (size == 0) return;
  Access access;
  memset(pointer, 0xff, size);
}

// --- pinned memory ---

static std::mutex pinned_mutex;
static std::map<uintptr_t, size_t>& pinned() {
  static auto* all = new std::map<uintptr_t, size_t>;
  return *all;
}

// A copy that still reads it keeps its tensor, so that it comes back later.
void* allocate_pinned(size_t size) {
  note(current_device(), "cudaHostAlloc", std::to_string(size));
  auto* pointer = malloc(size);
  memset(pointer, 0xff, size);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned()[reinterpret_cast<uintptr_t>(pointer)] = size;
  return pointer;
}

void release_pinned(void* pointer) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned().erase(reinterpret_cast<uintptr_t>(pointer));
  free(pointer);
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = pinned().upper_bound(address);
  if (after == pinned().begin()) return false;
  auto& [begin, size] = *std::prev(after);
  return address < begin + size;
}

}  // namespace sim
