// TCP: what the bootstrap and the connections between processes need. All waits end when `stop` becomes true.
#pragma once

#include <atomic>
#include <string>

#include <netinet/in.h>

namespace sim_nccl {

// An IPv4 address and a port, as it is sent to other processes.
struct Address {
  sockaddr_in bytes = {};
  std::string text() const;
};

// Closes its file at the end.
class File {
 public:
  explicit File(int descriptor = -1) : descriptor(descriptor) {}
  File(File&& other) noexcept : descriptor(other.descriptor) { other.descriptor = -1; }
  File& operator=(File&& other) noexcept {
    std::swap(descriptor, other.descriptor);
    return *this;
  }
  ~File();
  bool is_open() const { return descriptor >= 0; }
  operator int() const { return descriptor; }

 private:
  int descriptor;
};

using Stop = std::atomic<bool>;

// Chooses this host's address, by an interface, as NCCL does. Port 0. Returns false and a reason if there is none.
bool choose_address(Address* address, std::string* reason);
// Listens on a free port and writes it to `address`.
File listen_on(Address* address);
// These return a closed file or false when stopped, and when the other side has closed or failed.
File accept_from(const File& listener, const Stop& stop);
File connect_to(const Address& address, const Stop& stop);
bool send_all(int file, const void* data, size_t size, const Stop& stop);
bool receive_all(int file, void* data, size_t size, const Stop& stop);

}  // namespace sim_nccl
