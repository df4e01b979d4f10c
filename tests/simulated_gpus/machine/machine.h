// The simulated machine, shared by the three stand-ins. Its code is in libcuda.so.1.
//
// A GPU is host memory and streams. A stream is a queue with a thread. The host only adds work to queues, so a missing
// wait shows as it does on a GPU: as a wrong result, or as a hang.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace sim {

struct Stream;
struct Event;

// --- settings and the log ---

// An environment variable as a number; `fallback` if it is unset or empty.
long setting(const char* name, long fallback);
std::string text_setting(const char* name);
// Adds a line to the file SIM_LOG: the process, the device, the event and the detail.
void note(int device, const char* event, const std::string& detail = "");
// Returns a random delay in microseconds, 0 without SIM_SEED. The same seed, lane and index give the same delay.
long random_delay_us(uint64_t lane, uint64_t index);
void sleep_us(long microseconds);

// --- faults ---

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
// Notes the device's context if this is the first call for it: setting another device, a query, and work start one.
void start_context(int device);

// --- streams ---

Stream* default_stream(int device);
Stream* new_stream(int device);
Stream* current_stream(int device);
// Makes `stream` the calling thread's current stream of its device. Returns the previous one.
Stream* exchange_stream(Stream* stream);
int device_of(const Stream* stream);

// Adds work to the end of the queue. `name` is what SIM_FAULT calls it.
void launch(Stream* stream, const char* name, std::function<void()> work);
// As `launch`, for what CUDA does without a launch: it is not delayed.
void enqueue(Stream* stream, std::function<void()> work);
// Notes that the stream's last work waits for other ranks. A wait of the host for it, or for what depends on it, is
// noted as one behind NCCL, unless the host has seen before that it is done: whether it happens to be done is not asked.
void mark_collective(Stream* stream);
bool is_idle(Stream* stream);
// Blocks the host until the queue is empty, as cudaStreamSynchronize. The log has the `reason`.
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
// Returns the milliseconds between the moments at which streams reached two events, if both have times and are done.
std::optional<double> elapsed_ms(Event* start, Event* end);

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

}  // namespace sim
