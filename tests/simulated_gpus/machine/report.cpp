// The report: what the program asked of the GPUs, as one JSON object in the file SIM_REPORT.
//
// The program may leave with _exit or be killed, so the file is valid JSON between any two calls: it is mapped into
// memory, numbers have a fixed width, and spaces leave room for the log. JSON allows spaces between tokens.

#include "machine.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace sim {
namespace {

constexpr const char* names[] = {"launches", "cuda_mallocs", "pinned_mallocs", "host_waits",
                                 "host_waits_behind_nccl", "nccl_operations", "nccl_threads", "contexts",
                                 "reserved_bytes"};
constexpr size_t counters = sizeof names / sizeof *names;
constexpr int width = 16;               // of a number, in characters
constexpr size_t log_size = 4 << 20;    // in bytes; what comes later is only counted

struct Report {
  std::mutex mutex;
  char* numbers = nullptr;  // null: not wanted
  struct Field {
    long value = 0;
    char* place;
  };
  std::vector<Field> fields;  // by device and counter
  char* dropped_place;
  long dropped = 0;
  char *log, *log_end;
  bool is_log_empty = true;

  Report() : fields(counters * device_count()) {
    std::string file = text_setting("SIM_REPORT");
    if (file.empty()) return;
    const size_t process = file.find("%p");
    if (process != std::string::npos) file.replace(process, 2, std::to_string(getpid()));
    // The text, with the places of the numbers.
    std::string text = "{\"process\": " + std::to_string(getpid()) + ",\n \"gpus\": [";
    std::vector<size_t> places;
    auto add_number = [&](const char* name) {
      text += std::string("\"") + name + "\": ";
      places.push_back(text.size());
      text += std::string(width - 1, ' ') + "0";
    };
    for (int device = 0; device < device_count(); device++) {
      text += (device == 0 ? "\n  {\"gpu\": " : ",\n  {\"gpu\": ") + std::to_string(device);
      for (auto* name : names) {
        text += ", ";
        add_number(name);
      }
      text += "}";
    }
    text += "],\n ";
    add_number("log_dropped");
    text += ",\n \"log\": [";
    const size_t log_start = text.size();
    text += std::string(log_size, ' ') + "\n]}\n";

    const int descriptor = open(file.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (descriptor < 0 || ftruncate(descriptor, static_cast<off_t>(text.size())) != 0) {
      fprintf(stderr, "sim: SIM_REPORT=%s cannot be written\n", file.c_str());
      abort();
    }
    void* memory = mmap(nullptr, text.size(), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (memory == MAP_FAILED) abort();
    numbers = static_cast<char*>(memory);
    memcpy(numbers, text.data(), text.size());
    for (size_t i = 0; i < fields.size(); i++) fields[i].place = numbers + places[i];
    dropped_place = numbers + places.back();
    log = numbers + log_start;
    log_end = log + log_size;
  }

  static void write(char* place, long value) {
    char text[24];
    snprintf(text, sizeof text, "%*ld", width, value);
    memcpy(place, text, width);
  }
};

Report& report() {
  static auto* made = new Report;
  return *made;
}

}  // namespace

void count(int device, Counter counter, long amount) {
  auto& all = report();
  if (all.numbers == nullptr) return;
  std::lock_guard<std::mutex> lock(all.mutex);
  auto& field = all.fields.at(counters * static_cast<size_t>(device) + static_cast<size_t>(counter));
  Report::write(field.place, field.value += amount);
}

void log_event(int device, const char* event, const char* detail, size_t bytes) {
  auto& all = report();
  if (all.numbers == nullptr) return;
  std::lock_guard<std::mutex> lock(all.mutex);
  auto counted = [&](Counter counter) {
    return all.fields.at(counters * static_cast<size_t>(device) + static_cast<size_t>(counter)).value;
  };
  char line[256];
  const int length = snprintf(
      line, sizeof line,
      "%s\n  {\"gpu\": %d, \"event\": \"%s\", \"detail\": \"%s\", \"bytes\": %zu, \"launches\": %ld, "
      "\"nccl_operations\": %ld}",
      all.is_log_empty ? "" : ",", device, event, detail, bytes, counted(Counter::Launches),
      counted(Counter::NcclOperations));
  if (length < 0 || static_cast<size_t>(length) >= sizeof line || length > all.log_end - all.log) {
    Report::write(all.dropped_place, ++all.dropped);
    return;
  }
  memcpy(all.log, line, static_cast<size_t>(length));
  all.log += length;
  all.is_log_empty = false;
}

}  // namespace sim
