// The simulated machine, shared by the three stand-ins. Its code is in libcuda.so.1.
//
// A GPU is host memory and streams. A stream is a queue with a thread. The host only adds work to queues, so a missing
// wait shows as it does on a GPU: as a wrong result, or as a hang.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>

namespace sim {

struct Stream;
struct Event;

// --- settings ---

// An environment variable as a number; `fallback` if it is unset or empty.
long setting(const char* name, long fallback);
std::string text_setting(const char* name, const char* fallback = "");
// The name of the host that this process is on: SIM_HOST, or the system's.
std::string host_name();
// Prints to stderr if SIM_TRACE=1.
__attribute__((format(printf, 1, 2))) void trace(const char* format, ...);
// Returns a random delay in microseconds, 0 without SIM_SEED. The same seed, lane and index give the same delay.
long random_delay_us(uint64_t lane, uint64_t index);
void sleep_us(long microseconds);

// --- faults ---

// A setting KIND:KEY=VALUE,...; of no kind if there is none.
struct Fault {
  std::string kind;
  std::map<std::string, std::string> options;
  std::string option(const char* key) const;
};
// Reads the setting `variable`; ends the process if it has another kind or key.
Fault read_fault(const char* variable, const std::set<std::string>& kinds, const std::set<std::string>& keys);
// Returns `work`, or what SIM_FAULT makes of it: it never ends, or it ends the process.
std::function<void()> with_fault(const char* name, int device, std::function<void()> work);
// Changes a bit of the result of this work, if the fault is of that kind.
void spoil(const char* work, int device, void* result, size_t bytes);

// --- devices ---

// The number of visible GPUs: CUDA_VISIBLE_DEVICES has been applied.
int device_count();
// The number that a visible GPU has on its host.
int physical_device(int device);
// The current device of the calling thread.
int current_device();
void set_device(int device);
// Counts the device's context if this is the first call for it: setting a device to another, a query, and work start one.
void start_context(int device);

// Marks a device as failed for the rest of the process. The first reason stays.
void fail(int device, const std::string& reason);
// Returns why a device has failed, or an empty string.
std::string failure(int device);

// --- streams ---

Stream* default_stream(int device);
Stream* new_stream(int device);
Stream* current_stream(int device);
// Makes `stream` the calling thread's current stream of its device. Returns the previous one.
Stream* exchange_stream(Stream* stream);
int device_of(const Stream* stream);

// Adds work to the end of the queue. `name` must be a literal or live as long as the process.
void launch(Stream* stream, const char* name, std::function<void()> work);
// As `launch`, for what CUDA does without a launch: it is not delayed.
void enqueue(Stream* stream, const char* name, std::function<void()> work);
// Notes that the stream's last work waits for other ranks. A wait of the host for it, or for what depends on it, is
// counted as one behind NCCL, unless the host has seen before that it is done: whether it happens to be done is not asked.
void mark_collective(Stream* stream);
bool is_idle(Stream* stream);
// Blocks the host until the queue is empty, as cudaStreamSynchronize. SIM_TRACE prints the `reason`.
void synchronize(Stream* stream, const char* reason);
void synchronize_device(int device, const char* reason);

// --- events ---

Event* new_event(bool is_timed);
void free_event(Event* event);
void record(Event* event, Stream* stream);
// Makes the stream wait for the event as it was last recorded.
void wait(Stream* stream, Event* event);
// Returns what the host sees, which may lag behind the stream (SIM_SEED).
bool is_done(Event* event);
// Blocks the host.
void synchronize(Event* event);
enum class Elapsed { Known, NotTimed, NotDone };
// Writes the milliseconds between the moments at which the streams reached two events.
Elapsed elapsed_ms(Event* start, Event* end, double* milliseconds);

// --- memory ---

// Returns address space for the caching allocator, as cudaMalloc does.
char* take_segment(size_t size);
// Returns memory from the caching allocator, as c10::cuda::CUDACachingAllocator: it may be used at once in the order of
// `stream`. A GPU never runs out of memory.
void* allocate(int device, Stream* stream, size_t size);
// Gives memory back. The allocator's stream may reuse it at once; streams named by `record_use` are waited for.
void release(void* pointer);
void record_use(void* pointer, Stream* stream);
// Returns -1 for host memory, and for GPU memory that is not allocated.
int device_of_pointer(const void* pointer);
// Overwrites GPU memory with 0xff: NaN, or -1.
void poison(void* pointer, size_t size);

void* allocate_pinned(size_t size);
void release_pinned(void* pointer);
bool is_pinned(const void* pointer);

// Lets the calling thread use GPU memory for as long as it lives. Threads of streams always may. For all others, to
// follow a GPU's pointer is a segmentation fault, if the CPU has protection keys.
struct Access {
  Access();
  ~Access();
  Access(const Access&) = delete;
};

// --- the report (SIM_REPORT) ---

enum class Counter { CudaMallocs, PinnedMallocs, HostWaits, HostWaitsBehindNccl, Contexts };
void count(int device, Counter counter);

}  // namespace sim
