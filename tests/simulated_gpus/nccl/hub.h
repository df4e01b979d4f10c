// Where the ranks of a communicator meet: a thread of the process that has made the unique id. All ranks connect to it,
// whichever process of the host they are in.
//
// A rank sends its number, its GPU and its host, and gets a text: why it is refused, or nothing. It sends a launch,
// which is its calls with their inputs, and gets their outputs once all of them have ended. It sends an empty message
// when it finalizes, and gets one once all ranks have.
#pragma once

#include "types.h"

namespace sim_nccl {

// Makes an id, and starts the hub that it leads to. Returns a failure's result.
Result make_unique_id(UniqueId* id);
// Returns a connection to the hub of an id, or -1.
int connect_to_hub(const UniqueId& id);

// What a rank says of itself.
struct Hello {
  int32_t rank, size, device;
  char host[64];
};

// Messages. These return false when the connection ends.
bool send_message(int file, const Bytes& message);
bool receive_message(int file, Bytes* message);
// Adds a value to a message, and takes one from the place `at`, which moves on.
template <typename T>
void put(Bytes& message, const T& value) {
  auto* bytes = reinterpret_cast<const char*>(&value);
  message.insert(message.end(), bytes, bytes + sizeof value);
}
template <typename T>
T take(const char*& at) {
  T value;
  __builtin_memcpy(&value, at, sizeof value);
  at += sizeof value;
  return value;
}

}  // namespace sim_nccl
