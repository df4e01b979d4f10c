// The bootstrap: a root in the process that made the unique id, and the way of a rank through it.

#include "bootstrap.h"

#include <algorithm>
#include <cstring>
#include <random>

namespace sim_nccl {
namespace {

constexpr uint64_t magic = 0x5349'4d4e'4343'4c31;

// The content of a unique id.
struct Id {
  uint64_t magic;
  uint64_t number[2];
  Address address;
};
static_assert(sizeof(Id) <= sizeof(UniqueId));

Id read_id(const UniqueId& bytes) {
  Id id;
  memcpy(&id, bytes.internal, sizeof id);
  return id;
}

uint64_t random_number() {
  static std::mutex mutex;
  static auto* device = new std::random_device;
  std::lock_guard<std::mutex> lock(mutex);
  return uint64_t{(*device)()} << 32 | (*device)();
}

// Tells processes apart, also those of several hosts.
const uint64_t* this_process() {
  static const uint64_t number[2] = {random_number(), random_number()};
  return number;
}

using Inboxes = std::map<std::tuple<uint64_t, uint64_t, int>, std::shared_ptr<Inbox>>;
std::mutex inboxes_mutex;
Inboxes& inboxes() {
  static auto* all = new Inboxes;
  return *all;
}

// Waits for all ranks, then sends each the list of them.
void serve_root(File listener, Id id) {
  const Stop never{false};
  std::vector<Member> members;
  std::vector<File> files;
  size_t missing = 1;
  while (missing > 0) {
    File file = accept_from(listener, never);
    Member member;
    if (!file.is_open() || !receive_all(file, &member, sizeof member, never)) continue;
    const bool is_ours = member.id[0] == id.number[0] && member.id[1] == id.number[1];
    if (!is_ours || member.size < 1 || member.rank < 0 || member.rank >= member.size) continue;
    if (members.empty()) {
      members.resize(member.size);
      files.resize(member.size);
      missing = static_cast<size_t>(member.size);
    }
    if (static_cast<size_t>(member.size) != members.size() || files[member.rank].is_open()) continue;
    members[member.rank] = member;
    files[member.rank] = std::move(file);
    missing--;
  }
  for (auto& file : files) send_all(file, members.data(), members.size() * sizeof(Member), never);
}

// Whether two ranks may not be in one communicator, and why.
Result check_members(const std::vector<Member>& members, std::string* reason) {
  if (version() >= 23003 && sim::setting("NCCL_MULTI_RANK_GPU_ENABLE", 0) != 0) return Success;
  for (auto& a : members) {
    for (auto& b : members) {
      if (a.rank >= b.rank || strcmp(a.host, b.host) != 0 || a.device != b.device) continue;
      *reason = "Duplicate GPU detected : rank " + std::to_string(a.rank) + " and rank " + std::to_string(b.rank) +
                " both on CUDA device " + std::to_string(a.device);
      return InvalidUsage;
    }
  }
  return Success;
}

// What a rank says first to another rank that it connects to.
struct Greeting {
  uint64_t id[2];
  int32_t rank;
};

}  // namespace

Result make_unique_id(UniqueId* bytes) {
  Address address;
  std::string reason;
  if (!choose_address(&address, &reason)) return failed(SystemError, reason);
  File listener = listen_on(&address);
  if (!listener.is_open()) return failed(SystemError, "Bootstrap : cannot listen on " + address.text());
  const Id id{magic, {random_number(), random_number()}, address};
  memset(bytes, 0, sizeof *bytes);
  memcpy(bytes->internal, &id, sizeof id);
  std::thread([listener = std::move(listener), id]() mutable { serve_root(std::move(listener), id); }).detach();
  return Success;
}

void register_inbox(const UniqueId& bytes, int rank, std::shared_ptr<Inbox> inbox) {
  const auto id = read_id(bytes);
  std::lock_guard<std::mutex> lock(inboxes_mutex);
  inboxes()[{id.number[0], id.number[1], rank}] = std::move(inbox);
}

Result join(const UniqueId& bytes, int rank, int size, int device, const std::shared_ptr<Inbox>& inbox,
            const Stop& stop, Group* group, std::string* reason) {
  const auto id = read_id(bytes);
  if (id.magic != magic) {
    *reason = "the unique id is not one of ncclGetUniqueId's";
    return InvalidArgument;
  }
  Member own{};
  memcpy(own.id, id.number, sizeof own.id);
  memcpy(own.process, this_process(), sizeof own.process);
  snprintf(own.host, sizeof own.host, "%s", sim::text_setting("NCCL_HOSTID", sim::host_name().c_str()).c_str());
  own.rank = rank;
  own.size = size;
  own.device = device;
  if (!choose_address(&own.listener, reason)) return SystemError;
  File listener = listen_on(&own.listener);
  if (!listener.is_open()) {
    *reason = "cannot listen on " + own.listener.text();
    return SystemError;
  }

  const auto& root = id.address;
  auto lost = [&](const std::string& what) {
    *reason = what;
    return RemoteError;
  };
  File to_root = connect_to(root, stop);
  if (!to_root.is_open()) return lost("connection to the root at " + root.text() + " refused");
  group->members.resize(size);
  group->peers.resize(size);
  if (!send_all(to_root, &own, sizeof own, stop) ||
      !receive_all(to_root, group->members.data(), group->members.size() * sizeof(Member), stop)) {
    return lost("connection closed by the root at " + root.text());
  }
  if (auto refused = check_members(group->members, reason)) return refused;

  // Each connects to the ranks after it, and accepts those before it.
  std::vector<File> files(size);
  auto is_here = [&](int other) { return memcmp(group->members[other].process, own.process, sizeof own.process) == 0; };
  int expected = 0;
  for (int other = 0; other < size; other++) {
    if (other == rank || is_here(other)) continue;
    if (other < rank) {
      expected++;
      continue;
    }
    files[other] = connect_to(group->members[other].listener, stop);
    Greeting greeting{{id.number[0], id.number[1]}, rank};
    if (!files[other].is_open() || !send_all(files[other], &greeting, sizeof greeting, stop)) {
      return lost("connection to rank " + std::to_string(other) + " failed");
    }
  }
  while (expected > 0) {
    File file = accept_from(listener, stop);
    Greeting greeting;
    if (!file.is_open()) return lost("stopped");
    if (!receive_all(file, &greeting, sizeof greeting, stop)) continue;
    if (memcmp(greeting.id, id.number, sizeof greeting.id) != 0 || greeting.rank < 0 || greeting.rank >= rank) continue;
    files[greeting.rank] = std::move(file);
    expected--;
  }
  for (int other = 0; other < size; other++) {
    if (other == rank) continue;
    if (files[other].is_open()) {
      const bool is_other_host = strcmp(group->members[other].host, own.host) != 0;
      group->peers[other] = connect_peer(std::move(files[other]), rank, other, is_other_host, inbox);
      continue;
    }
    std::lock_guard<std::mutex> lock(inboxes_mutex);
    group->peers[other] = std::make_unique<LocalPeer>(rank, inboxes().at({id.number[0], id.number[1], other}));
  }
  return Success;
}

}  // namespace sim_nccl
