// The GPUs of the machine: which are visible, and the driver API that describes them.

#include "machine.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <vector>

namespace sim {

// As the driver: the list ends at the first word that is the number of no GPU.
static std::vector<int> find_visible() {
  const int count = static_cast<int>(setting("SIM_GPUS", 1));
  std::vector<int> visible;
  const char* list = getenv("CUDA_VISIBLE_DEVICES");
  if (list == nullptr) {
    for (int i = 0; i < count; i++) visible.push_back(i);
    return visible;
  }
  std::istringstream words(list);
  for (std::string word; std::getline(words, word, ',');) {
    char* end = nullptr;
    const long number = strtol(word.c_str(), &end, 10);
    if (end == word.c_str() || number < 0 || number >= count) break;
    visible.push_back(static_cast<int>(number));
  }
  return visible;
}

static const std::vector<int>& visible() {
  static auto* list = new std::vector<int>(find_visible());
  return *list;
}

int device_count() { return static_cast<int>(visible().size()); }
int physical_device(int device) { return visible().at(device); }

static thread_local int device_of_thread = 0;
int current_device() { return device_of_thread; }
void set_device(int device) {
  if (device == device_of_thread) return;
  start_context(device);
  device_of_thread = device;
}

void start_context(int device) {
  static auto* has_context = new std::vector<std::atomic<bool>>(device_count());
  if (!has_context->at(device).exchange(true)) note(device, "context");
}

}  // namespace sim

// --- the driver API, as far as ddp-mp calls it ---

extern "C" {

using CUresult = int;
constexpr CUresult SUCCESS = 0, NO_DEVICE = 100;

CUresult cuInit(unsigned) {
  if (long error = sim::setting("SIM_CUINIT_ERROR", 0)) return static_cast<CUresult>(error);
  return sim::device_count() == 0 ? NO_DEVICE : SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  *version = static_cast<int>(sim::setting("SIM_DRIVER_VERSION", 13000));
  return SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  *count = sim::device_count();
  return SUCCESS;
}

CUresult cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return SUCCESS;
}

CUresult cuDeviceGetName(char* name, int size, int device) {
  snprintf(name, static_cast<size_t>(size), "Simulated GPU %d", sim::physical_device(device));
  return SUCCESS;
}

CUresult cuDeviceGetUuid_v2(char* uuid, int device) {
  memset(uuid, 0, 16);
  uuid[15] = static_cast<char>(sim::physical_device(device));
  return SUCCESS;
}
CUresult cuDeviceGetUuid(char* uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }

}  // extern "C"
