// What an operation reads and writes, and reductions over ranks.

#include "types.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace sim_nccl {

uint64_t Agreement::output_bytes(int rank, int size) const {
  switch (operation) {
    case Reduce: return rank == root ? bytes() : 0;
    case AllGather: return bytes() * static_cast<uint64_t>(size);
    case Send: return 0;
    default: return bytes();
  }
}

uint64_t Agreement::input_bytes(int rank, int size) const {
  switch (operation) {
    case Broadcast: return rank == root ? bytes() : 0;
    case ReduceScatter: return bytes() * static_cast<uint64_t>(size);
    case Recv: return 0;
    default: return bytes();
  }
}

namespace {

struct Bf16 {
  uint16_t bits;
  Bf16() = default;
  // Rounds to the nearest, ties to even.
  explicit Bf16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    bits = std::isnan(value) ? 0x7fc0 : static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
  }
  operator float() const {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
};

template <typename T>
void reduce_as(Reduction reduction, const std::vector<const char*>& ranks, size_t count, char* result) {
  using Wide = std::conditional_t<sizeof(T) == 2, float, T>;  // in which a sum is computed
  const bool averages = reduction == Avg, divides_first = averages && std::is_floating_point<Wide>::value;
  const auto size = static_cast<Wide>(ranks.size());
  auto combine = [&](Wide a, Wide b) -> Wide {
    switch (reduction) {
      case Prod: return a * b;
      case Max: return std::max(a, b);
      case Min: return std::min(a, b);
      default: return a + b;
    }
  };
  for (size_t i = 0; i < count; i++) {
    T total{};
    for (size_t rank = 0; rank < ranks.size(); rank++) {
      T value;
      memcpy(&value, ranks[rank] + i * sizeof(T), sizeof(T));
      if (divides_first) value = T(Wide(value) / size);
      total = rank == 0 ? value : T(combine(Wide(total), Wide(value)));
    }
    if (averages && !divides_first) total = T(Wide(total) / size);
    memcpy(result + i * sizeof(T), &total, sizeof(T));
  }
}

}  // namespace

void reduce(DataType type, Reduction reduction, const std::vector<const char*>& ranks, size_t count, char* result) {
  switch (type) {
    case Int8: return reduce_as<int8_t>(reduction, ranks, count, result);
    case Uint8: return reduce_as<uint8_t>(reduction, ranks, count, result);
    case Int32: return reduce_as<int32_t>(reduction, ranks, count, result);
    case Uint32: return reduce_as<uint32_t>(reduction, ranks, count, result);
    case Int64: return reduce_as<int64_t>(reduction, ranks, count, result);
    case Uint64: return reduce_as<uint64_t>(reduction, ranks, count, result);
    case Float16: return reduce_as<_Float16>(reduction, ranks, count, result);
    case Float32: return reduce_as<float>(reduction, ranks, count, result);
    case Float64: return reduce_as<double>(reduction, ranks, count, result);
    case Bfloat16: return reduce_as<Bf16>(reduction, ranks, count, result);
    default: return;
  }
}

}  // namespace sim_nccl
