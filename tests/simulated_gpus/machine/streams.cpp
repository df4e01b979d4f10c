// Streams and events.

#include "machine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace sim {

using Clock = std::chrono::steady_clock;

// For each stream the number of its last collective, as far as something depends on it.
using Collectives = std::map<const Stream*, uint64_t>;

static void merge(Collectives& into, const Collectives& from) {
  for (auto& [stream, number] : from) into[stream] = std::max(into[stream], number);
}

struct Stream {
  int device;
  int number;  // 0: the default stream of its device
  long delay_us;
  std::mutex mutex;
  std::condition_variable changed;
  struct Work {
    std::function<void()> run;
    bool is_delayed;
  };
  std::deque<Work> queue;
  uint64_t launched = 0;
  uint64_t completed = 0;
  bool is_started = false;
  uint64_t collectives = 0;
  Collectives behind;  // those that the end of the queue depends on

  // Where its random delays come from.
  uint64_t lane() const { return static_cast<uint64_t>(physical_device(device)) << 32 | static_cast<uint32_t>(number); }
};

// By device; the first is the default stream. The mutex guards them.
static std::mutex machine_mutex;
static std::vector<std::vector<Stream*>>& streams() {
  static auto* all = new std::vector<std::vector<Stream*>>(device_count());
  return *all;
}

// With the lock held.
static Stream* make_stream(int device) {
  auto& of_device = streams().at(device);
  auto* stream = new Stream{};
  stream->device = device;
  stream->number = static_cast<int>(of_device.size());
  stream->delay_us = stream->number == 0 ? setting("SIM_DELAY_MAIN_US", 0) : 0;
  of_device.push_back(stream);
  return stream;
}

Stream* default_stream(int device) {
  std::lock_guard<std::mutex> lock(machine_mutex);
  auto& of_device = streams().at(device);
  return of_device.empty() ? make_stream(device) : of_device[0];
}

Stream* new_stream(int device) {
  default_stream(device);  // takes number 0
  std::lock_guard<std::mutex> lock(machine_mutex);
  return make_stream(device);
}

static std::vector<Stream*>& current_streams() {
  static thread_local std::vector<Stream*> current(device_count(), nullptr);
  return current;
}

Stream* current_stream(int device) {
  Stream*& current = current_streams().at(device);
  if (current == nullptr) current = default_stream(device);
  return current;
}

Stream* exchange_stream(Stream* stream) {
  Stream* before = current_stream(stream->device);
  current_streams()[stream->device] = stream;
  return before;
}

int device_of(const Stream* stream) { return stream->device; }

// The thread of a stream.
static void serve(Stream* stream) {
  Access access;
  for (uint64_t index = 0;;) {
    Stream::Work work;
    {
      std::unique_lock<std::mutex> lock(stream->mutex);
      stream->changed.wait(lock, [&] { return !stream->queue.empty(); });
      work = std::move(stream->queue.front());
      stream->queue.pop_front();
    }
    if (work.is_delayed) sleep_us(stream->delay_us + random_delay_us(stream->lane(), index++));
    work.run();
    work.run = nullptr;
    {
      std::lock_guard<std::mutex> lock(stream->mutex);
      stream->completed++;
    }
    stream->changed.notify_all();
  }
}

static void push(Stream* stream, Stream::Work work) {
  start_context(stream->device);
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    if (!stream->is_started) {
      stream->is_started = true;
      std::thread(serve, stream).detach();
    }
    stream->queue.push_back(std::move(work));
    stream->launched++;
  }
  stream->changed.notify_all();
}

// What the host has seen to be done.
static std::mutex seen_mutex;
static Collectives seen;

static void see(const Collectives& done) {
  std::lock_guard<std::mutex> lock(seen_mutex);
  merge(seen, done);
}

static bool is_seen(const Collectives& all) {
  std::lock_guard<std::mutex> lock(seen_mutex);
  return std::all_of(all.begin(), all.end(), [](auto& each) { return seen[each.first] >= each.second; });
}

void mark_collective(Stream* stream) {
  std::lock_guard<std::mutex> lock(stream->mutex);
  stream->behind[stream] = ++stream->collectives;
}

static Collectives behind(Stream* stream) {
  std::lock_guard<std::mutex> lock(stream->mutex);
  return stream->behind;
}

void launch(Stream* stream, const char* name, std::function<void()> work) {
  push(stream, {with_fault(name, stream->device, std::move(work)), true});
}

void enqueue(Stream* stream, std::function<void()> work) { push(stream, {std::move(work), false}); }

bool is_idle(Stream* stream) {
  std::lock_guard<std::mutex> lock(stream->mutex);
  return stream->launched == stream->completed;
}

static void drain(Stream* stream) {
  std::unique_lock<std::mutex> lock(stream->mutex);
  const uint64_t all = stream->launched;
  stream->changed.wait(lock, [&] { return stream->completed >= all; });
}

static void note_wait(int device, const char* reason, const Collectives& behind) {
  note(device, is_seen(behind) ? "host waits" : "host waits behind NCCL", reason);
}

void synchronize(Stream* stream, const char* reason) {
  const auto all = behind(stream);
  note_wait(stream->device, reason, all);
  drain(stream);
  see(all);
}

void synchronize_device(int device, const char* reason) {
  default_stream(device);
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> lock(machine_mutex);
    all = streams().at(device);
  }
  Collectives collectives;
  for (auto* stream : all) merge(collectives, behind(stream));
  note_wait(device, reason, collectives);
  for (auto* stream : all) drain(stream);
  see(collectives);
}

// --- events ---

// One recording of an event.
struct Mark {
  std::atomic<bool> is_passed{false};
  Collectives behind;         // what the recording depends on
  Clock::time_point at;       // when the stream reached it
  Clock::time_point visible;  // when the host may see that
};

struct Event {
  bool is_timed;
  std::atomic<std::shared_ptr<Mark>> mark;  // null: never recorded
};

Event* new_event(bool is_timed) { return new Event{is_timed}; }

void free_event(Event* event) { delete event; }

void record(Event* event, Stream* stream) {
  auto mark = std::make_shared<Mark>();
  // Numbered by the host, so that the schedule follows from the seed.
  uint64_t index;
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    index = stream->launched;
    mark->behind = stream->behind;
  }
  const auto lag = std::chrono::microseconds(random_delay_us(~stream->lane(), index));
  push(stream, {[mark, lag] {
    mark->at = Clock::now();
    mark->visible = mark->at + lag;
    mark->is_passed = true;
    mark->is_passed.notify_all();
  }, true});
  event->mark = mark;
}

void wait(Stream* stream, Event* event) {
  // As if the program had forgotten all its waits: no test of an order may pass.
  static const bool is_ignored = setting("SIM_IGNORE_WAITS", 0) != 0;
  if (is_ignored) return;
  const auto mark = event->mark.load();
  if (mark == nullptr) return;
  push(stream, {[mark] { mark->is_passed.wait(false); }, true});
  std::lock_guard<std::mutex> lock(stream->mutex);
  merge(stream->behind, mark->behind);
}

bool is_done(Event* event) {
  const auto mark = event->mark.load();
  if (mark == nullptr) return true;
  if (!mark->is_passed || Clock::now() < mark->visible) return false;
  see(mark->behind);
  return true;
}

std::optional<double> elapsed_ms(Event* start, Event* end) {
  const auto from = start->mark.load(), to = end->mark.load();
  if (!start->is_timed || !end->is_timed || from == nullptr || to == nullptr) return {};
  if (!is_done(start) || !is_done(end)) return {};
  static const double rate = 1 + static_cast<double>(setting("SIM_CLOCK_PPM", 0)) / 1e6;
  return rate * std::chrono::duration<double, std::milli>(to->at - from->at).count();
}

}  // namespace sim
