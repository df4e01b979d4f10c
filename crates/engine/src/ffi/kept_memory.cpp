// A CPU allocator for libtorch that keeps large blocks for reuse. Declared in ffi/kept_memory.rs.
//
// glibc's malloc unmaps a large block when it is freed. Each step then has a page fault for every 4 KiB of its
// gradients and activations. malloc's settings only help on the main thread, because the heaps of other threads end at
// 64 MiB.
//
// Blocks of 256 KiB and more are mapped, and are at most 12.5 % larger than requested. Pages that no thread writes to
// take no memory. A freed block goes to the free lists of the thread that freed it, so ranks do not wait for each
// other. A thread whose lists have no block of the size takes one from other threads before it maps a new one. Smaller
// blocks come from malloc and are aligned here: libtorch's posix_memalign takes twice as long as malloc.
//
// The size of used and kept blocks together is bounded: by 1.5 times the peak of the used blocks, or by this peak plus
// 256 MiB if that is more. A factor is needed because the sizes have their peaks at different times in a step. With
// 1.25 the CNN mapped blocks in each step. Above the bound, the blocks that were freed first are unmapped first. Blocks
// that were not used for 4096 allocations of large blocks are unmapped in any case: a large tensor from the start of a
// run does not stay.

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

namespace {

// Sizes have 8 classes for each power of two, from 256 KiB to 1 TiB.
constexpr int kSmallestLog = 18, kLargestLog = 40;
constexpr int kClasses = (kLargestLog - kSmallestLog) * 8;
constexpr size_t kSmallest = size_t{1} << kSmallestLog, kLargest = size_t{15} << (kLargestLog - 4);
// A block's age is the number of large blocks that have been allocated since it was freed.
constexpr uint64_t kMaxAge = 4096, kCheckInterval = 256;

constexpr size_t kAlwaysKept = size_t{256} << 20;

constexpr unsigned kThreadSlots = 64;

constexpr size_t kAlignment = 64;

// Stands directly ahead of each tensor's memory.
struct alignas(16) BlockHeader {
  void* base;
  bool is_mapped;
};

// Stands at the base of mapped memory.
struct Block {
  int size_class;
  uint64_t freed_at;
  Block* next;
};

static_assert(sizeof(Block) + sizeof(BlockHeader) <= kAlignment);

// Returns the tensor's memory in an allocation of at least kAlignment bytes more, which starts at `base`.
void* data_in(void* base, bool is_mapped) {
  auto address = reinterpret_cast<uintptr_t>(base) + sizeof(BlockHeader) + kAlignment - 1;
  auto* data = reinterpret_cast<BlockHeader*>(address & ~(kAlignment - 1));
  data[-1] = {base, is_mapped};
  return data;
}

int class_of(size_t bytes) {
  int log = 63 - __builtin_clzll(bytes);
  size_t eighths = ((bytes - 1) >> (log - 3)) + 1;  // 8 to 16
  return (log - kSmallestLog) * 8 + static_cast<int>(eighths) - 8;
}

// Returns the bytes of a block of a class, with those ahead of the tensor.
size_t bytes_of(int size_class) {
  return ((size_t{8} + size_class % 8) << (kSmallestLog - 3 + size_class / 8)) + kAlignment;
}

// The large blocks of the process.
std::atomic<uint64_t> allocations{0};
std::atomic<size_t> in_use{0}, peak{0}, mapped{0};

// The free blocks of one thread (of several, if there are more threads than free_lists). Each list is in the order in which
// its blocks were freed, the last one first.
class FreeLists {
 public:
  void put(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    block->freed_at = allocations.load(std::memory_order_relaxed);
    block->next = lists_[block->size_class];
    lists_[block->size_class] = block;
    count_.fetch_add(1, std::memory_order_relaxed);
  }

  Block* take(int size_class) {
    if (count_.load(std::memory_order_relaxed) == 0) return nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    Block* block = lists_[size_class];
    if (block == nullptr) return nullptr;
    lists_[size_class] = block->next;
    count_.fetch_sub(1, std::memory_order_relaxed);
    return block;
  }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  // Unmaps the blocks that were freed at `time` or before.
  void unmap_until(uint64_t time) {
    if (count_.load(std::memory_order_relaxed) == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& list : lists_) {
      Block** end = &list;
      while (*end != nullptr && (*end)->freed_at > time) end = &(*end)->next;
      while (Block* block = *end) {
        *end = block->next;
        count_.fetch_sub(1, std::memory_order_relaxed);
        size_t bytes = bytes_of(block->size_class);
        munmap(block, bytes);
        mapped.fetch_sub(bytes, std::memory_order_relaxed);
      }
    }
  }

 private:
  std::mutex mutex_;
  std::atomic<int> count_{0};
  Block* lists_[kClasses] = {};
};

FreeLists free_lists[kThreadSlots];
std::atomic<unsigned> threads{0};
thread_local const unsigned own_lists = threads.fetch_add(1, std::memory_order_relaxed);

void unmap_until(uint64_t time) {
  for (auto& lists : free_lists) lists.unmap_until(time);
}

void lock_all() {
  for (auto& lists : free_lists) lists.lock();
}

void unlock_all() {
  for (auto& lists : free_lists) lists.unlock();
}

// Maps a new block. Returns null if the system refuses.
Block* map(int size_class) {
  size_t bytes = bytes_of(size_class);
  size_t most = peak.load(std::memory_order_relaxed);
  size_t bound = most + std::max(most / 2, kAlwaysKept);
  size_t after = mapped.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  uint64_t now = allocations.load(std::memory_order_relaxed);
  for (uint64_t age = std::min(now, kMaxAge); after > bound; age /= 2) {
    unmap_until(now - age);
    after = mapped.load(std::memory_order_relaxed);
    if (age == 0) break;
  }
  auto try_map = [&] {
    return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  };
  void* memory = try_map();
  if (memory == MAP_FAILED) {
    unmap_until(now);
    memory = try_map();
  }
  if (memory == MAP_FAILED) {
    mapped.fetch_sub(bytes, std::memory_order_relaxed);
    return nullptr;
  }
  // libtorch aligns to pages where THP_MEM_ALLOC_ENABLE asks for huge ones.
  if (c10::c10_compute_alignment(bytes) > kAlignment) madvise(memory, bytes, MADV_HUGEPAGE);
  auto* block = static_cast<Block*>(memory);
  block->size_class = size_class;
  return block;
}

// Returns a block of a class. Null if the system refuses.
Block* take(int size_class) {
  uint64_t now = allocations.fetch_add(1, std::memory_order_relaxed) + 1;
  if (now % kCheckInterval == 0 && now > kMaxAge) unmap_until(now - kMaxAge);
  size_t bytes = bytes_of(size_class);
  size_t used = in_use.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  size_t most = peak.load(std::memory_order_relaxed);
  while (used > most && !peak.compare_exchange_weak(most, used, std::memory_order_relaxed)) {
  }
  Block* block = nullptr;
  for (unsigned i = 0; block == nullptr && i < kThreadSlots; i++) {
    block = free_lists[(own_lists + i) % kThreadSlots].take(size_class);
  }
  if (block == nullptr) block = map(size_class);
  if (block == nullptr) in_use.fetch_sub(bytes, std::memory_order_relaxed);
  return block;
}

void release(void* data) {
  if (data == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  BlockHeader header = static_cast<BlockHeader*>(data)[-1];
  if (header.is_mapped) {
    auto* block = static_cast<Block*>(header.base);
    in_use.fetch_sub(bytes_of(block->size_class), std::memory_order_relaxed);
    free_lists[own_lists % kThreadSlots].put(block);
  } else {
    free(header.base);
  }
}

// One deleter serves all memory, as `raw_deleter` promises. Reports to libtorch's profiler, like libtorch's allocator.
struct KeepingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    bool is_mapped = bytes >= kSmallest && bytes <= kLargest;
    void* base = nullptr;
    if (is_mapped) {
      base = take(class_of(bytes));
    } else if (bytes <= PTRDIFF_MAX) {
      base = malloc(bytes + kAlignment);
      if (base == nullptr) {
        unmap_until(UINT64_MAX);  // the kept blocks may hold the memory that is needed
        base = malloc(bytes + kAlignment);
      }
    }
    if (base == nullptr) {
      c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
      TORCH_CHECK(false, "can't allocate memory: you tried to allocate ", bytes, " bytes");
    }
    void* data = data_in(base, is_mapped);
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
};

KeepingAllocator allocator;

}  // namespace

extern "C" {

// Makes libtorch allocate CPU tensors here, unless it has an allocator of higher priority.
void ddp_keep_memory() {
  // A child of fork has only the forking thread: a list that another thread has locked would stay
  // locked.
  static const int registered = pthread_atfork(lock_all, unlock_all, unlock_all);
  static_cast<void>(registered);
  c10::SetCPUAllocator(&allocator, /*priority=*/1);
}

// Returns whether libtorch allocates CPU tensors here.
bool ddp_keeps_memory() { return c10::GetCPUAllocator() == &allocator; }

// Unmaps all free blocks. The peak that bounds them starts again.
void ddp_give_back_memory() {
  unmap_until(UINT64_MAX);
  peak.store(in_use.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

// Returns the bytes of the free blocks.
size_t ddp_kept_memory() {
  size_t used = in_use.load(std::memory_order_relaxed);
  return std::max(mapped.load(std::memory_order_relaxed), used) - used;
}

}  // extern "C"
