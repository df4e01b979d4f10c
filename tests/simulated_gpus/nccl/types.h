// NCCL's numbers and names, as far as the stand-in knows them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../machine/machine.h"

namespace sim_nccl {

enum Result {
  Success,
  UnhandledCudaError,
  SystemError,
  InternalError,
  InvalidArgument,
  InvalidUsage,
  RemoteError,
  InProgress
};
enum DataType { Int8, Uint8, Int32, Uint32, Int64, Uint64, Float16, Float32, Float64, Bfloat16, DataTypes };
enum Reduction { Sum, Prod, Max, Min, Avg, Reductions };
enum Operation { AllReduce, Reduce, Broadcast, AllGather, ReduceScatter, Send, Recv };

constexpr const char* operation_names[] = {"ncclAllReduce",     "ncclReduce", "ncclBroadcast", "ncclAllGather",
                                           "ncclReduceScatter", "ncclSend",   "ncclRecv"};
constexpr size_t element_sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

struct UniqueId {
  char internal[128];
};

// The version that NCCL has, such as 22907: SIM_NCCL_VERSION.
inline long version() { return sim::setting("SIM_NCCL_VERSION", 22907); }

using Bytes = std::vector<char>;

// What all ranks of an operation must agree on. The root of a send is the receiver, and the other way round.
struct Agreement {
  Operation operation;
  DataType type;
  Reduction reduction;
  int root;
  uint64_t count;

  uint64_t bytes() const { return count * element_sizes[type]; }
  bool is_collective() const { return operation != Send && operation != Recv; }
  uint64_t input_bytes(int rank, int size) const;
  uint64_t output_bytes(int rank, int size) const;
};

// Reduces `count` elements of each rank, rank by rank. Results of half precision are rounded after each rank.
void reduce(DataType type, Reduction reduction, const std::vector<const char*>& ranks, size_t count, char* result);

}  // namespace sim_nccl
