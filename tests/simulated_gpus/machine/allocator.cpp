// The caching allocator, as c10::cuda::CUDACachingAllocator.
//
// A freed block goes back to the stream that it was allocated on, which may have it again at once, while its earlier
// work still uses it. A block that was also used on other streams returns once they are done. What is freed is
// overwritten in the order of its own stream: a missing `record_stream` shows.

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "machine.h"

namespace sim {
namespace {

constexpr size_t min_block = 512;
constexpr size_t segment = size_t{2} << 20;  // the least that cudaMalloc is asked for

struct Block {
  int device;
  Stream* stream;
  size_t size;  // a power of two
  char* address;
  std::set<Stream*> users = {};  // streams named by `record_use`
};

// A freed block that other streams still use.
struct Deferred {
  Block* block;
  std::vector<Event*> events;
};

// Of one device. The lock is held during cudaMalloc, as in libtorch.
struct Cache {
  std::mutex mutex;
  std::map<std::pair<Stream*, size_t>, std::vector<Block*>> free;
  std::deque<Deferred> deferred;
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

void free_block(Cache& cache, Block* block) {
  auto overwrite = [address = block->address, size = block->size] { poison(address, size); };
  if (is_idle(block->stream)) {
    overwrite();
  } else {
    enqueue(block->stream, overwrite);
  }
  block->users.clear();
  cache.free[{block->stream, block->size}].push_back(block);
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

// Gets free blocks of this size from cudaMalloc.
void cuda_malloc(std::vector<Block*>& free, int device, Stream* stream, size_t size) {
  const auto bytes = std::max(size, segment);
  note(device, "cudaMalloc", std::to_string(bytes));
  // It may wait until GPUs are idle.
  static const bool waits = setting("SIM_MALLOC_WAITS", 0) != 0;
  for (int i = 0; waits && i < device_count(); i++) synchronize_device(i, "cudaMalloc");
  auto* memory = take_segment(bytes);
  poison(memory, bytes);
  for (size_t at = 0; at < bytes; at += size) free.push_back(new Block{device, stream, size, memory + at});
}

}  // namespace

void* allocate(int device, Stream* stream, size_t requested) {
  auto& cache = cache_of(device);
  std::lock_guard<std::mutex> lock(cache.mutex);
  free_deferred(cache);
  size_t size = min_block;
  while (size < requested) size *= 2;
  auto& same = cache.free[{stream, size}];
  if (same.empty()) cuda_malloc(same, device, stream, size);
  auto* block = same.back();
  same.pop_back();
  std::lock_guard<std::mutex> blocks_lock(blocks_mutex);
  blocks()[reinterpret_cast<uintptr_t>(block->address)] = block;
  return block->address;
}

void release(void* pointer) {
  Block* block = nullptr;
  {
    std::lock_guard<std::mutex> lock(blocks_mutex);
    auto found = blocks().find(reinterpret_cast<uintptr_t>(pointer));
    if (found == blocks().end()) return;
    block = found->second;
    blocks().erase(found);
  }
  auto& cache = cache_of(block->device);
  std::lock_guard<std::mutex> lock(cache.mutex);
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
