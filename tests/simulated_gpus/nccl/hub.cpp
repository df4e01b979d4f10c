// The hub: it joins the ranks of a communicator, and ends their operations.

#include "hub.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace sim_nccl {
namespace {

// A call of a rank. What it takes part in ends for all ranks at once.
struct Part {
  Agreement call;
  Bytes input, output;
  bool is_done = false;
};

struct Member {
  int file = -1;  // -1: it has not come, or has left
  Hello hello{};
  std::vector<Part> launch;  // the one that has not ended, if it is not empty
  bool is_final = false;

  // Returns the first call that waits and that `fits`, or null.
  template <typename F>
  Part* waiting(F fits) {
    for (auto& part : launch) {
      if (!part.is_done && fits(part.call)) return &part;
    }
    return nullptr;
  }
};

bool agree(const Agreement& a, const Agreement& b) {
  return a.operation == b.operation && a.count == b.count && a.type == b.type && a.reduction == b.reduction &&
         a.root == b.root;
}

class Hub {
 public:
  // Serves the ranks until all of them have left.
  void serve(int listener) {
    while (!has_started || has_member()) {
      std::vector<pollfd> wanted;
      if (!has_started) wanted.push_back({listener, POLLIN, 0});
      for (auto& member : members) {
        if (member.file >= 0) wanted.push_back({member.file, POLLIN, 0});
      }
      if (poll(wanted.data(), wanted.size(), -1) <= 0) continue;
      for (auto& each : wanted) {
        if (each.revents == 0) continue;
        if (each.fd == listener) {
          admit(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
        } else {
          hear(*std::find_if(members.begin(), members.end(), [&](auto& it) { return it.file == each.fd; }));
        }
      }
    }
    close(listener);
  }

 private:
  std::vector<Member> members;
  size_t come = 0;
  bool has_started = false;

  bool has_member() const {
    return std::any_of(members.begin(), members.end(), [](auto& member) { return member.file >= 0; });
  }

  // The rank waits forever if another has its number.
  void admit(int file) {
    Bytes message;
    if (file < 0 || !receive_message(file, &message)) return;
    const char* at = message.data();
    const auto hello = take<Hello>(at);
    if (members.empty()) members.resize(static_cast<size_t>(hello.size));
    auto& member = members.at(static_cast<size_t>(hello.rank));
    if (static_cast<size_t>(hello.size) != members.size() || member.hello.size != 0) return;
    member.file = file;
    member.hello = hello;
    if (++come < members.size()) return;
    has_started = true;
    const auto refused = find_shared_gpu();
    for (auto& each : members) send_message(each.file, Bytes(refused.begin(), refused.end()));
  }

  // Returns why these ranks may not be in one communicator, or nothing.
  std::string find_shared_gpu() const {
    if (version() >= 23003 && sim::setting("NCCL_MULTI_RANK_GPU_ENABLE", 0) != 0) return {};
    for (auto& one : members) {
      for (auto& other : members) {
        const auto &a = one.hello, &b = other.hello;
        if (a.rank >= b.rank || strcmp(a.host, b.host) != 0 || a.device != b.device) continue;
        return "Duplicate GPU detected : rank " + std::to_string(a.rank) + " and rank " + std::to_string(b.rank) +
               " both on CUDA device " + std::to_string(a.device);
      }
    }
    return {};
  }

  void hear(Member& member) {
    Bytes message;
    if (!receive_message(member.file, &message)) {
      // Nobody notices: others wait for its part in what has not ended.
      close(member.file);
      member.file = -1;
      member.launch.clear();
      return;
    }
    if (message.empty()) return finalize(member);
    const auto rank = member.hello.rank, size = member.hello.size;
    for (const char *at = message.data(), *end = at + message.size(); at < end;) {
      const auto call = take<Agreement>(at);
      const auto bytes = call.input_bytes(rank, size);
      member.launch.push_back({call, Bytes(at, at + bytes), Bytes(call.output_bytes(rank, size))});
      at += bytes;
    }
    while (end_collective() || end_message()) continue;
    for (auto& each : members) answer(each);
  }

  void finalize(Member& member) {
    member.is_final = true;
    if (!std::all_of(members.begin(), members.end(), [](auto& it) { return it.is_final; })) return;
    for (auto& each : members) send_message(each.file, {});
  }

  // Sends the outputs of a launch that has ended.
  void answer(Member& member) {
    if (member.launch.empty() || member.waiting([](auto&) { return true; }) != nullptr) return;
    Bytes all;
    for (auto& part : member.launch) all.insert(all.end(), part.output.begin(), part.output.end());
    member.launch.clear();
    send_message(member.file, all);
  }

  // Ends the next collective if all ranks have called it. If their calls differ, it never ends.
  bool end_collective() {
    std::vector<Part*> parts;
    for (auto& member : members) {
      parts.push_back(member.waiting([](auto& call) { return call.is_collective(); }));
      if (parts.back() == nullptr || !agree(parts[0]->call, parts.back()->call)) return false;
    }
    const auto& call = parts[0]->call;
    const auto bytes = call.bytes();
    std::vector<const char*> inputs;
    for (auto* part : parts) inputs.push_back(part->input.data());
    for (auto* part : parts) {
      part->is_done = true;
      auto& output = part->output;
      if (output.empty()) continue;
      switch (call.operation) {
        case Broadcast: output = parts[static_cast<size_t>(call.root)]->input; break;
        case AllGather:
          output.clear();
          for (auto* each : parts) output.insert(output.end(), each->input.begin(), each->input.end());
          break;
        default: reduce(call.type, call.reduction, inputs, call.count, output.data());
      }
      if (call.operation != ReduceScatter) continue;
      for (auto& input : inputs) input += bytes;
    }
    return true;
  }

  // Ends a message that its sender and its receiver have both called.
  bool end_message() {
    for (auto& from : members) {
      for (auto& to : members) {
        auto* sent = from.waiting([&](auto& it) { return it.operation == Send && it.root == to.hello.rank; });
        auto* received = to.waiting([&](auto& it) { return it.operation == Recv && it.root == from.hello.rank; });
        if (sent == nullptr || received == nullptr || sent->call.bytes() != received->call.bytes()) continue;
        received->output = sent->input;
        sent->is_done = received->is_done = true;
        return true;
      }
    }
    return false;
  }
};

// An abstract name, which ends with its listener.
struct Address {
  sockaddr_un name = {AF_UNIX, {}};
  socklen_t length;
  explicit Address(const UniqueId& id) {
    const auto size = strnlen(id.internal, sizeof name.sun_path - 1);
    memcpy(name.sun_path + 1, id.internal, size);
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
  }
  operator const sockaddr*() const { return reinterpret_cast<const sockaddr*>(&name); }
};

int new_socket() { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); }

// Moves all of `size` bytes by calls of `move`, which takes where to go on and how many are left.
template <class Move>
bool move_all(size_t size, Move move) {
  for (size_t done = 0; done < size;) {
    const ssize_t moved = move(done, size - done);
    if (moved == 0 || (moved < 0 && errno != EINTR)) return false;
    if (moved > 0) done += static_cast<size_t>(moved);
  }
  return true;
}

bool send_all(int file, const void* data, size_t size) {
  auto* from = static_cast<const char*>(data);
  return move_all(size, [&](size_t done, size_t left) { return send(file, from + done, left, MSG_NOSIGNAL); });
}

bool receive_all(int file, void* data, size_t size) {
  auto* to = static_cast<char*>(data);
  return move_all(size, [&](size_t done, size_t left) { return recv(file, to + done, left, 0); });
}

}  // namespace

bool send_message(int file, const Bytes& message) {
  const uint64_t size = message.size();
  return send_all(file, &size, sizeof size) && send_all(file, message.data(), size);
}

bool receive_message(int file, Bytes* message) {
  uint64_t size = 0;
  if (!receive_all(file, &size, sizeof size)) return false;
  message->resize(size);
  return receive_all(file, message->data(), size);
}

Result make_unique_id(UniqueId* id) {
  static std::mutex mutex;
  static auto* random = new std::random_device;
  std::lock_guard<std::mutex> lock(mutex);
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "sim-nccl-%08x%08x", (*random)(), (*random)());
  const int listener = new_socket();
  const Address address(*id);
  if (bind(listener, address, address.length) != 0 || listen(listener, 1024) != 0) return SystemError;
  std::thread([listener] { Hub().serve(listener); }).detach();
  return Success;
}

int connect_to_hub(const UniqueId& id) {
  const int file = new_socket();
  const Address address(id);
  if (connect(file, address, address.length) == 0) return file;
  close(file);
  return -1;
}

}  // namespace sim_nccl
