// Streams, events, the caching allocator and the report.

#include <algorithm>
#include <filesystem>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>

#include <unistd.h>

#include "checks.h"

namespace checks {
namespace {

using namespace sim;

constexpr size_t MiB = 1 << 20;

// Work that waits until it is let go.
struct Gate {
  std::promise<void> promise;
  std::shared_future<void> opened = promise.get_future().share();
  explicit Gate(Stream* stream) {
    launch(stream, "gate", [opened = opened] { opened.wait(); });
  }
  void open() { promise.set_value(); }
};

unsigned char read_byte(void* pointer) {
  Access access;
  return *static_cast<unsigned char*>(pointer);
}

void write_bytes(Stream* stream, void* pointer, int value, size_t size) {
  launch(stream, "write", [=] { memset(pointer, value, size); });
}

std::string read_file(const char* name) {
  std::string text;
  FILE* file = fopen(name, "r");
  if (file == nullptr) return text;
  char buffer[4096];
  while (size_t size = fread(buffer, 1, sizeof buffer, file)) text.append(buffer, size);
  fclose(file);
  return text;
}

// The number after "name": in the report.
long reported(const std::string& report, const std::string& name) {
  const auto at = report.find("\"" + name + "\":");
  return at == std::string::npos ? -1 : atol(report.c_str() + at + name.size() + 3);
}

void check_reuse() {
  auto *main = default_stream(0), *side = new_stream(0);
  auto* first = allocate(0, main, 1000);
  // Work of the same stream may still use it; it is overwritten after that.
  Gate gate(main);
  write_bytes(main, first, 1, 1000);
  unsigned char seen = 0;
  launch(main, "read", [&] { seen = *static_cast<unsigned char*>(first); });
  release(first);
  EXPECT(allocate(0, main, 700) == first);
  EXPECT(allocate(0, side, 700) != first);
  gate.open();
  synchronize(main, "check");
  EXPECT(seen == 1);
  EXPECT(read_byte(first) == 0xff);
  EXPECT(device_of_pointer(first) == 0);
  release(first);
  EXPECT(device_of_pointer(first) == -1);
}

void check_record_use(bool is_recorded) {
  auto *main = default_stream(0), *side = new_stream(0);
  auto* block = allocate(0, main, 512);
  write_bytes(main, block, 1, 512);
  synchronize(main, "check");
  Gate gate(side);
  unsigned char seen = 0;
  launch(side, "read", [&] { seen = *static_cast<unsigned char*>(block); });
  if (is_recorded) record_use(block, side);
  release(block);
  EXPECT((allocate(0, main, 512) == block) == !is_recorded);
  gate.open();
  synchronize(side, "check");
  EXPECT(seen == (is_recorded ? 1 : 0xff));
  if (is_recorded) EXPECT(comes_true([&] { return allocate(0, main, 512) == block; }));
}

void check_report() {
  const char* file = getenv("SIM_REPORT");
  auto* stream = default_stream(1);
  for (int i = 0; i < 100; i++) {
    auto* block = allocate(1, stream, 3 * MiB);
    launch(stream, "nothing", [] {});
    release(block);
  }
  synchronize(stream, "check");
  const auto report = read_file(file);
  const auto second = report.substr(report.find("{\"gpu\": 1"));
  EXPECT(reported(second, "launches") == 100);
  EXPECT(reported(second, "cuda_mallocs") == 1);
  EXPECT(reported(second, "host_waits") == 1);
  EXPECT(reported(second, "reserved_bytes") == 20 * static_cast<long>(MiB));
  const auto log = report.substr(report.find("\"log\""));
  EXPECT(log.find("\"cudaMalloc\", \"detail\": \"\", \"bytes\": 20971520, \"launches\": 0") != std::string::npos);
  EXPECT(log.find("\"event\": \"host wait\", \"detail\": \"check\"") != std::string::npos);
}

// A wait for what depends on a collective, until the host has seen that it is done; however fast the streams are.
void check_behind() {
  auto *main = default_stream(0), *side = new_stream(0);
  auto waits = [] { return reported(read_file(getenv("SIM_REPORT")), "host_waits_behind_nccl"); };
  auto* event = new_event(false);
  launch(side, "collective", [] {});
  mark_collective(side);
  record(event, side);
  sleep_us(50000);
  synchronize(main, "check");
  EXPECT(waits() == 0);
  wait(main, event);
  synchronize(main, "check");
  EXPECT(waits() == 1);
  synchronize(side, "check");  // the host has seen it
  mark_collective(side);
  record(event, side);
  EXPECT(comes_true([&] { return is_done(event); }));
  synchronize(side, "check");
  EXPECT(waits() == 1);
}

std::vector<long> schedule() {
  std::vector<long> delays;
  for (uint64_t index = 0; index < 1000; index++) delays.push_back(random_delay_us(1, index));
  return delays;
}

void check_seed() {
  const auto delays = schedule();
  const auto zeros = std::count(delays.begin(), delays.end(), 0);
  EXPECT(delays == schedule());
  EXPECT(zeros > 600 && zeros < 900);
  EXPECT(*std::max_element(delays.begin(), delays.end()) > 500);
  EXPECT(*std::max_element(delays.begin(), delays.end()) <= 1000);
}

}  // namespace

void check_machine() {
  check("a freed block is reused at once, in stream order", {}, check_reuse);
  check("record_use keeps a block for another stream", {}, [] { check_record_use(true); });
  check("without record_use the other stream reads garbage", {},
        [] { check_record_use(false); });
  const auto report = std::filesystem::temp_directory_path() / ("simulated-gpus-report-" + std::to_string(getpid()));
  check("the report counts", {{"SIM_REPORT", report.c_str()}, {"SIM_GPUS", "2"}}, check_report);
  check("the report counts waits behind a collective", {{"SIM_REPORT", report.c_str()}}, check_behind);
  std::filesystem::remove(report);
  check("a seed makes a schedule", {{"SIM_SEED", "7"}, {"SIM_DELAY_MAX_US", "1000"}}, check_seed);
}

}  // namespace checks
