// The caching allocator, as c10::cuda::CUDACachingAllocator.
//
// It takes segments from cudaMalloc and splits them into blocks. A freed block goes back to the pool of the stream that
// it was allocated on. That stream may have it again at once, while its earlier work still uses it. A block that was
// also used on other streams returns once they are done. What is freed is overwritten in the order of its own stream:
// a missing `record_stream` shows.

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "machine.h"

namespace sim {
namespace {

constexpr size_t KiB = 1024, MiB = 1024 * KiB;
constexpr size_t min_block = 512;
constexpr size_t max_small = 1 * MiB;            // larger allocations come from the large pool
constexpr size_t small_segment = 2 * MiB;
constexpr size_t large_segment = 20 * MiB;       // for allocations of up to `min_own_segment`
constexpr size_t min_own_segment = 10 * MiB;     // from here on an allocation has a segment of its own
constexpr size_t own_segment_multiple = 2 * MiB;

size_t rounded_to(size_t size, size_t multiple) { return (size + multiple - 1) / multiple * multiple; }

struct Block {
  int device;
  Stream* stream;
  char* address;
  size_t size;
  bool is_small;
  bool is_allocated = false;
  Block *previous = nullptr, *next = nullptr;  // its neighbours in the segment
  std::set<Stream*> users;                     // streams named by `record_use`
};

struct BySize {
  static auto key(const Block* block) { return std::make_tuple(block->stream, block->size, block->address); }
  bool operator()(const Block* a, const Block* b) const { return key(a) < key(b); }
};
using Pool = std::set<Block*, BySize>;

// A freed block that other streams still use.
struct Deferred {
  Block* block;
  std::vector<Event*> events;
};

// Of one device. The lock is held during cudaMalloc, as in libtorch.
struct Cache {
  std::mutex mutex;
  Pool small, large;
  std::deque<Deferred> deferred;
  Pool& pool_of(const Block* block) { return block->is_small ? small : large; }
};

Cache& cache_of(int device) {
  static auto* all = new std::vector<Cache>(device_count());
  return all->at(device);
}

// Allocated blocks by address.
std::mutex blocks_mutex;
std::map<uintptr_t, Block*>& blocks() {
  static auto* all = new std::map<uintptr_t, Block*>;
  return *all;
}

// Joins `block` with a free neighbour.
void merge(Cache& cache, Block* block, Block* neighbour) {
  if (neighbour == nullptr || neighbour->is_allocated || cache.pool_of(neighbour).erase(neighbour) == 0) return;
  if (block->previous == neighbour) {
    block->address = neighbour->address;
    block->previous = neighbour->previous;
    if (block->previous != nullptr) block->previous->next = block;
  } else {
    block->next = neighbour->next;
    if (block->next != nullptr) block->next->previous = block;
  }
  block->size += neighbour->size;
  delete neighbour;
}

void free_block(Cache& cache, Block* block) {
  auto overwrite = [address = block->address, size = block->size] { poison(address, size); };
  if (is_idle(block->stream)) {
    overwrite();
  } else {
    enqueue(block->stream, "free", overwrite);
  }
  block->users.clear();
  merge(cache, block, block->previous);
  merge(cache, block, block->next);
  cache.pool_of(block).insert(block);
}

// Frees blocks whose other streams are done with them, in the order in which they were released.
void free_deferred(Cache& cache) {
  for (auto it = cache.deferred.begin(); it != cache.deferred.end();) {
    const bool is_free = std::all_of(it->events.begin(), it->events.end(), [](Event* event) { return is_done(event); });
    if (!is_free) {
      ++it;
      continue;
    }
    for (auto* event : it->events) free_event(event);
    free_block(cache, it->block);
    it = cache.deferred.erase(it);
  }
}

// cudaMalloc may wait until GPUs are idle.
void wait_as_cuda_malloc(int device) {
  static const long waits = setting("SIM_MALLOC_WAITS", 0);
  for (int i = 0; i < device_count(); i++) {
    if (waits >= 2 || (waits == 1 && i == device)) synchronize_device(i, "cudaMalloc");
  }
}

Block* cuda_malloc(int device, Stream* stream, size_t size, bool is_small) {
  count(device, Counter::CudaMallocs);
  trace("GPU %d: cudaMalloc of %zu bytes", device, size);
  wait_as_cuda_malloc(device);
  auto* block = new Block{device, stream, take_segment(size), size, is_small};
  poison(block->address, size);
  return block;
}

// Returns the smallest free block of the stream that is large enough, or null.
Block* find_block(Pool& pool, Stream* stream, size_t size) {
  Block wanted{0, stream, nullptr, size, false};
  auto found = pool.lower_bound(&wanted);
  if (found == pool.end() || (*found)->stream != stream) return nullptr;
  auto* block = *found;
  pool.erase(found);
  return block;
}

void split(Cache& cache, Block* block, size_t size) {
  const size_t rest = block->size - size;
  if (block->is_small ? rest < min_block : rest <= max_small) return;
  auto* remaining = new Block{block->device, block->stream, block->address + size, rest, block->is_small};
  remaining->previous = block;
  remaining->next = block->next;
  if (remaining->next != nullptr) remaining->next->previous = remaining;
  block->next = remaining;
  block->size = size;
  cache.pool_of(remaining).insert(remaining);
}

// Removes the block of an address from the allocated ones, or returns null.
Block* take_block(void* pointer) {
  std::lock_guard<std::mutex> lock(blocks_mutex);
  auto found = blocks().find(reinterpret_cast<uintptr_t>(pointer));
  if (found == blocks().end()) return nullptr;
  auto* block = found->second;
  blocks().erase(found);
  return block;
}

}  // namespace

void* allocate(int device, Stream* stream, size_t requested) {
  auto& cache = cache_of(device);
  std::lock_guard<std::mutex> lock(cache.mutex);
  free_deferred(cache);
  const size_t size = rounded_to(std::max<size_t>(requested, 1), min_block);
  const bool is_small = size <= max_small;
  auto& pool = is_small ? cache.small : cache.large;
  auto* block = find_block(pool, stream, size);
  if (block == nullptr) {
    const size_t segment = is_small                 ? small_segment
                           : size < min_own_segment ? large_segment
                                                    : rounded_to(size, own_segment_multiple);
    block = cuda_malloc(device, stream, segment, is_small);
  }
  split(cache, block, size);
  block->is_allocated = true;
  std::lock_guard<std::mutex> blocks_lock(blocks_mutex);
  blocks()[reinterpret_cast<uintptr_t>(block->address)] = block;
  return block->address;
}

void release(void* pointer) {
  auto* block = take_block(pointer);
  if (block == nullptr) return;
  auto& cache = cache_of(block->device);
  std::lock_guard<std::mutex> lock(cache.mutex);
  block->is_allocated = false;
  std::vector<Event*> events;
  for (auto* user : block->users) {
    if (user == block->stream) continue;
    events.push_back(new_event(false));
    record(events.back(), user);
  }
  if (events.empty()) {
    free_block(cache, block);
  } else {
    cache.deferred.push_back({block, std::move(events)});
  }
}

void record_use(void* pointer, Stream* stream) {
  std::lock_guard<std::mutex> lock(blocks_mutex);
  auto found = blocks().find(reinterpret_cast<uintptr_t>(pointer));
  if (found != blocks().end()) found->second->users.insert(stream);
}

int device_of_pointer(const void* pointer) {
  std::lock_guard<std::mutex> lock(blocks_mutex);
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = blocks().upper_bound(address);
  if (after == blocks().begin()) return -1;
  auto& [begin, block] = *std::prev(after);
  return address < begin + block->size ? block->device : -1;
}

}  // namespace sim
