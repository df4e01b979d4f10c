// The functions of libnccl.so.2 that ddp-mp calls.

#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "communicator.h"

namespace sim_nccl {
namespace {

// One for the whole process, whichever thread writes it.
std::mutex last_error_mutex;
char last_error[1024] = "";

// A call with a communicator that has ended is a defect of the program: it must not go unnoticed.
void check_alive(Comm comm, const char* call) {
  if (comm != nullptr && comm->state == ncclComm::alive) return;
  fprintf(stderr, "sim: %s with a communicator that %s\n", call, comm == nullptr ? "is null" : "has ended");
  abort();
}

// Of this thread. A group is of one communicator and one stream.
thread_local int group_depth = 0;
thread_local Launch group;
thread_local Result group_error = Success;

Result launch_group() {
  const auto launch = std::move(group);
  group = {};
  return launch.calls.empty() ? Success : begin(launch);
}

std::string find_mistake(Comm comm, sim::Stream* stream, const Call& call) {
  const auto& agreed = call.agreed;
  if (agreed.type < 0 || agreed.type >= DataTypes) return "invalid type";
  if (agreed.reduction < 0 || agreed.reduction >= Reductions) return "invalid reduction";
  if (agreed.root < 0 || agreed.root >= comm->size) return "invalid root or peer";
  if (sim::device_of(stream) != comm->device) return "the stream is another device's";
  if (group.comm != nullptr && (group.comm != comm || group.stream != stream)) return "a group of several streams";
  const bool writes = agreed.operation != Reduce || agreed.root == comm->rank;
  for (auto* buffer : {call.input, writes ? static_cast<const void*>(call.output) : nullptr}) {
    if (buffer == nullptr || agreed.count == 0) continue;
    const int device = sim::device_of_pointer(buffer);
    if (device != comm->device) {
      return "a buffer is on device " + std::to_string(device) + ", not " + std::to_string(comm->device);
    }
  }
  return {};
}

Result add(Comm comm, sim::Stream* stream, const Call& call) {
  const std::string name = operation_names[call.agreed.operation];
  check_alive(comm, name.c_str());
  auto refuse = [](Result result, const std::string& reason) {
    if (group_depth > 0) group_error = result;
    return failed(result, reason);
  };
  const auto mistake = find_mistake(comm, stream, call);
  if (!mistake.empty()) return refuse(InvalidArgument, name + " : " + mistake);
  if (comm->is_finalized) return refuse(InvalidUsage, name + " after ncclCommFinalize");
  if (comm->error != Success) return refuse(static_cast<Result>(comm->error.load()), comm->error_text);
  if (!comm->is_joined || comm->polls_left > 0) {
    return refuse(InvalidArgument, "Attempt to use communicator before the previous operation returned ncclSuccess");
  }
  group.comm = comm;
  group.stream = stream;
  group.calls.push_back(call);
  return group_depth == 0 ? launch_group() : Success;
}

// The configuration, in the layout that all versions share from 2.14 on. NCCL reads no more than it knows.
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};

// The program must not let a communicator block: its call would not come back from a failure of another rank.
Result check_config(const Config* config) {
  const bool is_known = config->magic == 0xcafebeef && config->version >= 21400;
  if (is_known && config->blocking == 0) return Success;
  return failed(InvalidArgument, "Invalid config blocking attribute value " + std::to_string(config->blocking));
}

}  // namespace

Result failed(Result result, const std::string& reason) {
  std::lock_guard<std::mutex> lock(last_error_mutex);
  snprintf(last_error, sizeof last_error, "%s", reason.c_str());
  return result;
}

}  // namespace sim_nccl

using namespace sim_nccl;

extern "C" {

int ncclGetVersion(int* number) {
  *number = static_cast<int>(version());
  return Success;
}

int ncclGetUniqueId(UniqueId* id) { return make_unique_id(id); }

const char* ncclGetErrorString(int result) {
  switch (result) {
    case Success: return "no error";
    case UnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case SystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case InvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case InvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case RemoteError: return "remote process exited or there was a network error";
    case InProgress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}

const char* ncclGetLastError(Comm) { return last_error; }

int ncclCommInitRankConfig(Comm* comm, int size, UniqueId id, int rank, const Config* config) {
  if (size < 1 || rank < 0 || rank >= size) return failed(InvalidArgument, "Invalid rank requested");
  if (auto refused = check_config(config)) return refused;
  *comm = new ncclComm{.rank = rank, .size = size, .device = sim::current_device()};
  // A rank with this fault never comes.
  if (fault_at(rank, 0).empty()) join(*comm, id);
  (*comm)->polls_left = 2;
  return InProgress;
}

int ncclCommGetAsyncError(Comm comm, int* state) {
  check_alive(comm, "ncclCommGetAsyncError");
  *state = poll(comm);
  return Success;
}

int ncclCommFinalize(Comm comm) {
  check_alive(comm, "ncclCommFinalize");
  if (!comm->is_joined) return failed(InvalidArgument, "ncclCommFinalize before the communicator was ready");
  comm->is_finalized = true;
  return InProgress;
}

int ncclCommDestroy(Comm comm) {
  check_alive(comm, "ncclCommDestroy");
  end(comm);
  return Success;
}

int ncclCommAbort(Comm comm) {
  check_alive(comm, "ncclCommAbort");
  end(comm);
  return Success;
}

int ncclGroupStart() {
  if (group_depth++ == 0) group_error = Success;
  return Success;
}

int ncclGroupEnd() {
  if (group_depth == 0) return failed(InvalidUsage, "ncclGroupEnd: not in a group call.");
  if (--group_depth > 0) return Success;
  if (group_error == Success) return launch_group();
  group = {};
  return group_error;
}

int ncclAllReduce(const void* input, void* output, size_t count, int type, int reduction, Comm comm,
                  sim::Stream* stream) {
  return add(comm, stream, {{AllReduce, DataType(type), Reduction(reduction), 0, count}, input, output});
}
int ncclReduce(const void* input, void* output, size_t count, int type, int reduction, int root, Comm comm,
               sim::Stream* stream) {
  return add(comm, stream, {{Reduce, DataType(type), Reduction(reduction), root, count}, input, output});
}
int ncclBroadcast(const void* input, void* output, size_t count, int type, int root, Comm comm, sim::Stream* stream) {
  return add(comm, stream, {{Broadcast, DataType(type), Sum, root, count}, input, output});
}
int ncclAllGather(const void* input, void* output, size_t count, int type, Comm comm, sim::Stream* stream) {
  return add(comm, stream, {{AllGather, DataType(type), Sum, 0, count}, input, output});
}
int ncclReduceScatter(const void* input, void* output, size_t count, int type, int reduction, Comm comm,
                      sim::Stream* stream) {
  return add(comm, stream, {{ReduceScatter, DataType(type), Reduction(reduction), 0, count}, input, output});
}
int ncclSend(const void* input, size_t count, int type, int peer, Comm comm, sim::Stream* stream) {
  return add(comm, stream, {{Send, DataType(type), Sum, peer, count}, input, nullptr});
}
int ncclRecv(void* output, size_t count, int type, int peer, Comm comm, sim::Stream* stream) {
  return add(comm, stream, {{Recv, DataType(type), Sum, peer, count}, nullptr, output});
}

}  // extern "C"
