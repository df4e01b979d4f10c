// The report: what the program asked of the GPUs, as one JSON object in the file SIM_REPORT.
//
// The program may leave with _exit or be killed, so the file is valid JSON between any two calls: it is mapped into
// memory, and numbers have a fixed width. JSON allows spaces between tokens.

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

constexpr const char* names[] = {"cuda_mallocs", "pinned_mallocs", "host_waits", "host_waits_behind_nccl", "contexts"};
constexpr size_t counters = sizeof names / sizeof *names;
constexpr int width = 16;  // of a number, in characters

struct Report {
  std::mutex mutex;
  struct Field {
    long value = 0;
    char* place;
  };
  std::vector<Field> fields;  // by device and counter; empty: not wanted

  Report() {
    std::string file = text_setting("SIM_REPORT");
    if (file.empty()) return;
    const size_t process = file.find("%p");
    if (process != std::string::npos) file.replace(process, 2, std::to_string(getpid()));
    // The text, with the places of the numbers.
    std::string text = "{\"process\": " + std::to_string(getpid()) + ",\n \"gpus\": [";
    std::vector<size_t> places;
    for (int device = 0; device < device_count(); device++) {
      text += (device == 0 ? "\n  {\"gpu\": " : ",\n  {\"gpu\": ") + std::to_string(device);
      for (auto* name : names) {
        text += std::string(", \"") + name + "\": ";
        places.push_back(text.size());
        text += std::string(width - 1, ' ') + "0";
      }
      text += "}";
    }
    text += "]}\n";

    const int descriptor = open(file.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (descriptor < 0 || ftruncate(descriptor, static_cast<off_t>(text.size())) != 0) {
      fprintf(stderr, "sim: SIM_REPORT=%s cannot be written\n", file.c_str());
      abort();
    }
    void* memory = mmap(nullptr, text.size(), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (memory == MAP_FAILED) abort();
    memcpy(memory, text.data(), text.size());
    for (size_t place : places) fields.push_back({0, static_cast<char*>(memory) + place});
  }
};

}  // namespace

void count(int device, Counter counter) {
  static auto* report = new Report;
  if (report->fields.empty()) return;
  std::lock_guard<std::mutex> lock(report->mutex);
  auto& field = report->fields.at(counters * static_cast<size_t>(device) + static_cast<size_t>(counter));
  char text[24];
  snprintf(text, sizeof text, "%*ld", width, ++field.value);
  memcpy(field.place, text, width);
}

}  // namespace sim
