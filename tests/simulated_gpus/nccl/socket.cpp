// TCP with waits that can be stopped.

#include "socket.h"

#include <cerrno>
#include <cstring>
#include <vector>

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include "types.h"

namespace sim_nccl {

File::~File() {
  if (descriptor >= 0) close(descriptor);
}

std::string Address::text() const {
  char text[INET_ADDRSTRLEN] = "?";
  inet_ntop(AF_INET, &bytes.sin_addr, text, sizeof text);
  return text;
}

bool choose_address(Address* address, std::string* reason) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) {
    *reason = "getifaddrs: " + std::string(strerror(errno));
    return false;
  }
  // As NCCL: loopback and docker's bridge only where there is nothing else.
  int best = 0;
  for (auto* each = all; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || (each->ifa_flags & IFF_UP) == 0) continue;
    if (each->ifa_addr->sa_family != AF_INET) continue;
    const std::string name = each->ifa_name;
    const int rank = name == "lo" ? 1 : name.rfind("docker", 0) == 0 ? 2 : 3;
    if (rank <= best) continue;
    best = rank;
    memcpy(&address->bytes, each->ifa_addr, sizeof address->bytes);
  }
  freeifaddrs(all);
  *reason = "Bootstrap : no socket interface found";
  return best > 0;
}

static void set_options(int file) {
  const int on = 1;
  setsockopt(file, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

File listen_on(Address* address) {
  File listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  auto* bytes = reinterpret_cast<sockaddr*>(&address->bytes);
  socklen_t length = sizeof address->bytes;
  if (!listener.is_open() || bind(listener, bytes, length) != 0 || listen(listener, 1024) != 0 ||
      getsockname(listener, bytes, &length) != 0) {
    return File();
  }
  return listener;
}

// Waits until `events` or an error; false when stopped.
static bool await(int file, short events, const Stop& stop) {
  while (!stop) {
    pollfd wanted{file, events, 0};
    if (poll(&wanted, 1, 20) > 0) return true;
  }
  return false;
}

File accept_from(const File& listener, const Stop& stop) {
  while (await(listener, POLLIN, stop)) {
    File file(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!file.is_open()) continue;
    set_options(file);
    return file;
  }
  return File();
}

File connect_to(const Address& address, const Stop& stop) {
  File file(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!file.is_open()) return file;
  set_options(file);
  if (connect(file, reinterpret_cast<const sockaddr*>(&address.bytes), sizeof address.bytes) == 0) return file;
  if (errno != EINPROGRESS || !await(file, POLLOUT, stop)) return File();
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(file, SOL_SOCKET, SO_ERROR, &error, &length);
  return error == 0 ? std::move(file) : File();
}

// Moves all of `size` bytes by calls of `move`, which takes where to go on and how many are left; false when stopped.
template <class Move>
static bool move_all(int file, short events, size_t size, const Stop& stop, Move move) {
  for (size_t done = 0; done < size;) {
    if (stop) return false;
    const ssize_t moved = move(done, size - done);
    if (moved > 0) {
      done += static_cast<size_t>(moved);
    } else if (moved == 0 || (errno != EAGAIN && errno != EINTR) || !await(file, events, stop)) {
      return false;
    }
  }
  return true;
}

bool send_all(int file, const void* data, size_t size, const Stop& stop) {
  auto* from = static_cast<const char*>(data);
  return move_all(file, POLLOUT, size, stop,
                  [&](size_t done, size_t left) { return send(file, from + done, left, MSG_NOSIGNAL); });
}

bool receive_all(int file, void* data, size_t size, const Stop& stop) {
  auto* to = static_cast<char*>(data);
  return move_all(file, POLLIN, size, stop,
                  [&](size_t done, size_t left) { return recv(file, to + done, left, 0); });
}

}  // namespace sim_nccl
