// The functions of libnccl.so.2 that ddp-mp calls.
//
// A communicator launches on a thread of each group. It answers "in progress" until then and for some polls more, and
// refuses calls meanwhile.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <system_error>

#include "communicator.h"

namespace sim_nccl {
namespace {

// One for the whole process, whichever thread writes it.
std::mutex last_error_mutex;
char last_error[1024] = "";

}  // namespace

void remember(const std::string& reason) {
  std::lock_guard<std::mutex> lock(last_error_mutex);
  snprintf(last_error, sizeof last_error, "%s", reason.c_str());
}

Result failed(Result result, const std::string& reason) {
  remember(reason);
  sim::trace("NCCL fails: %s", reason.c_str());
  return result;
}

namespace {

// A call with a communicator that has ended is a defect of the program: it must not go unnoticed.
void check_alive(Comm comm, const char* call) {
  if (comm != nullptr && comm->state == ncclComm::alive) return;
  fprintf(stderr, "sim: %s with a communicator that %s\n", call, comm == nullptr ? "is null" : "has ended");
  abort();
}

// --- groups ---

struct Launch {
  Comm comm;
  sim::Stream* stream;
  std::vector<Call> calls;
};
thread_local int group_depth = 0;
thread_local std::vector<Launch> group;
thread_local Result group_error = Success;

// Calls `work`, which launches, on a thread.
Result launch(Comm comm, std::function<void()> work) {
  comm->outstanding++;
  if (comm->launcher.joinable()) comm->launcher.join();
  comm->is_launching = true;
  begin_polls(comm);
  try {
    comm->launcher = std::thread([comm, work = std::move(work)] {
      work();
      comm->is_launching = false;
    });
  } catch (const std::system_error& error) {
    comm->outstanding--;
    comm->is_launching = false;
    fail(comm, SystemError, std::string("Call to pthread_create failed: ") + error.what());
    return SystemError;
  }
  return InProgress;
}

Result launch_all() {
  auto launches = std::move(group);
  group.clear();
  auto result = Success;
  for (auto& [comm, stream, calls] : launches) {
    const long number = ++comm->launches;
    const auto fault = fault_at(false, comm->rank, number);
    if (fault == "launch") {
      fail(comm, UnhandledCudaError, "Cuda failure 'unspecified launch failure'");
      result = failed(UnhandledCudaError, comm->error_text);
      continue;
    }
    const auto launched = launch(comm, [=, comm = comm, stream = stream, calls = std::move(calls)] {
      sim::launch(stream, operation_names[calls[0].agreed.operation], [=] {
        run(comm, calls, static_cast<uint64_t>(number), fault);
        comm->outstanding--;
        comm->inbox->wake();
      });
      if (comm->size > 1) sim::mark_collective(stream);
    });
    if (result == Success || launched == SystemError) result = launched;
  }
  return result;
}

std::string find_mistake(Comm comm, sim::Stream* stream, const Call& call) {
  const auto& agreed = call.agreed;
  if (agreed.type < 0 || agreed.type >= DataTypes) return "invalid type";
  if (agreed.reduction < 0 || agreed.reduction >= Reductions) return "invalid reduction";
  if (agreed.root < 0 || agreed.root >= comm->size) return "invalid root or peer";
  if (sim::device_of(stream) != comm->device) return "the stream is another device's";
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
  if (!comm->is_joined || comm->is_launching || comm->polls_left > 0) {
    return refuse(InvalidArgument, "Attempt to use communicator before the previous operation returned ncclSuccess");
  }
  for (auto& each : group) {
    if (each.comm != comm || each.stream != stream) continue;
    each.calls.push_back(call);
    return Success;
  }
  group.push_back({comm, stream, {call}});
  return group_depth == 0 ? launch_all() : Success;
}

// --- initialization ---

// The configuration, in the layout that all versions share from 2.14 on. NCCL reads no more than it knows.
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};
constexpr unsigned config_magic = 0xcafebeef;

// The program must not let a communicator block: its call would not come back from a failure of another rank.
Result check_config(const Config* config) {
  if (config == nullptr || config->size < offsetof(Config, blocking) + sizeof(int) || config->magic != config_magic) {
    return failed(InvalidArgument, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
  }
  if (config->version < 21400 || config->blocking != 0) {
    return failed(InvalidArgument, "Invalid config blocking attribute value " + std::to_string(config->blocking));
  }
  return Success;
}

// Returns how many communicators the rank number has been given in this process, with this one.
long count_communicators(int rank) {
  static std::mutex mutex;
  static auto* counts = new std::map<int, long>;
  std::lock_guard<std::mutex> lock(mutex);
  return ++(*counts)[rank];
}

// On a thread of its own.
void bootstrap(Comm comm) {
  std::string reason;
  const auto result = join(comm->id, comm->rank, comm->size, sim::physical_device(comm->device), comm->inbox,
                           comm->is_aborted, &comm->group, &reason);
  if (result != Success) {
    fail(comm, result, reason);
  } else {
    comm->is_joined = true;
  }
  comm->inbox->wake();
}

// Ends the communicator. Its memory stays, so that a later use is noticed.
void end(Comm comm, bool is_abort) {
  if (is_abort) {
    comm->is_aborted = true;
    comm->inbox->wake();
  }
  if (comm->bootstrap.joinable()) comm->bootstrap.join();
  if (comm->launcher.joinable()) comm->launcher.join();
  comm->inbox->wait_until([&] { return comm->outstanding == 0; });
  for (auto& peer : comm->group.peers) {
    if (peer != nullptr) peer->end(is_abort);
  }
  comm->state = 0;
}

}  // namespace
}  // namespace sim_nccl

using namespace sim_nccl;

extern "C" {

int ncclGetVersion(int* number) {
  *number = version();
  return Success;
}

int ncclGetUniqueId(UniqueId* id) { return make_unique_id(id); }

const char* ncclGetErrorString(int result) {
  switch (result) {
    case Success: return "no error";
    case UnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case SystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case InternalError: return "internal error - please report this issue to the NCCL developers";
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
  auto* fresh = new ncclComm;
  fresh->id = id;
  fresh->rank = rank;
  fresh->size = size;
  fresh->device = sim::current_device();
  fresh->inbox = std::make_shared<Inbox>(size);
  *comm = fresh;
  register_inbox(id, rank, fresh->inbox);
  // A rank with this fault never checks in.
  const auto fault = fault_at(true, rank, count_communicators(rank));
  if (fault.empty()) fresh->bootstrap = std::thread(bootstrap, fresh);
  begin_polls(fresh);
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
  for (auto& peer : comm->group.peers) {
    if (peer == nullptr) continue;
    peer->post({Message::Kind::Finalize, {}, {}, 0}, nullptr);
    peer->flush();
  }
  return InProgress;
}

int ncclCommDestroy(Comm comm) {
  check_alive(comm, "ncclCommDestroy");
  end(comm, false);
  return Success;
}

int ncclCommAbort(Comm comm) {
  check_alive(comm, "ncclCommAbort");
  end(comm, true);
  return Success;
}

int ncclGroupStart() {
  if (group_depth++ == 0) group_error = Success;
  return Success;
}

int ncclGroupEnd() {
  if (group_depth == 0) return failed(InvalidUsage, "ncclGroupEnd: not in a group call.");
  if (--group_depth > 0) return Success;
  if (group_error == Success) return launch_all();
  group.clear();
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
