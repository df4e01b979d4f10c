// The GPUs of the machine: which are visible, which have failed, and the driver API that describes them.

#include "machine.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <vector>

namespace sim {

// No two GPUs have the same: hosts differ by a hash (FNV-1a) of their name.
static std::string uuid_text(int physical) {
  uint32_t host = 2166136261;
  for (char c : host_name()) host = (host ^ static_cast<unsigned char>(c)) * 16777619;
  char text[64];
  snprintf(text, sizeof text, "GPU-%08x-0000-4000-8000-%012x", host, physical);
  return text;
}

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
  if (!has_context->at(device).exchange(true)) count(device, Counter::Contexts);
}

static std::mutex failures_mutex;
static std::atomic<bool> has_failure{false};
static std::map<int, std::string>& failures() {
  static auto* all = new std::map<int, std::string>;
  return *all;
}

void fail(int device, const std::string& reason) {
  std::lock_guard<std::mutex> lock(failures_mutex);
  failures().emplace(device, reason);
  has_failure = true;
  trace("GPU %d fails: %s", device, reason.c_str());
}

std::string failure(int device) {
  if (!has_failure) return {};
  std::lock_guard<std::mutex> lock(failures_mutex);
  auto found = failures().find(device);
  return found == failures().end() ? std::string() : found->second;
}

}  // namespace sim

// --- the driver API, as far as ddp-mp calls it ---

extern "C" {

using CUresult = int;
constexpr CUresult SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101;
static std::atomic<bool> is_initialized{false};

static CUresult check(int device) {
  if (!is_initialized) return NOT_INITIALIZED;
  return device < 0 || device >= sim::device_count() ? INVALID_DEVICE : SUCCESS;
}

CUresult cuInit(unsigned) {
  if (long error = sim::setting("SIM_CUINIT_ERROR", 0)) return static_cast<CUresult>(error);
  if (sim::device_count() == 0) return NO_DEVICE;
  is_initialized = true;
  return SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  *version = static_cast<int>(sim::setting("SIM_DRIVER_VERSION", 13000));
  return SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  if (!is_initialized) return NOT_INITIALIZED;
  *count = sim::device_count();
  return SUCCESS;
}

CUresult cuDeviceGet(int* device, int ordinal) {
  if (CUresult error = check(ordinal)) return error;
  *device = ordinal;
  return SUCCESS;
}

CUresult cuDeviceGetName(char* name, int size, int device) {
  if (CUresult error = check(device)) return error;
  snprintf(name, static_cast<size_t>(size), "Simulated GPU %d", sim::physical_device(device));
  return SUCCESS;
}

CUresult cuDeviceGetUuid_v2(char* uuid, int device) {
  if (CUresult error = check(device)) return error;
  std::string digits;
  for (char c : sim::uuid_text(sim::physical_device(device)).substr(4)) {
    if (c != '-') digits += c;
  }
  for (size_t i = 0; i < 16; i++) {
    uuid[i] = static_cast<char>(std::stoi(digits.substr(2 * i, 2), nullptr, 16));
  }
  return SUCCESS;
}
CUresult cuDeviceGetUuid(char* uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }

struct ErrorText {
  CUresult error;
  const char *name, *text;
};
constexpr ErrorText error_texts[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
     "system has unsupported display driver / cuda driver combination"},
};

static CUresult find_text(CUresult error, const char* ErrorText::*field, const char** text) {
  *text = nullptr;
  for (auto& known : error_texts) {
    if (known.error == error) *text = known.*field;
  }
  return *text == nullptr ? INVALID_VALUE : SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** name) { return find_text(error, &ErrorText::name, name); }
CUresult cuGetErrorString(CUresult error, const char** text) { return find_text(error, &ErrorText::text, text); }

}  // extern "C"
