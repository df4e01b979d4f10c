// Sums and other reductions over ranks.

#include "types.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace sim_nccl {
namespace {

struct Bf16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
  // Rounds to the nearest, ties to even.
  static Bf16 from(float value) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    if (std::isnan(value)) return {0x7fc0};
    return {static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16)};
  }
};

// The type that a sum is computed in, and back.
template <typename T>
struct Arithmetic {
  using type = T;
  static T round(T value) { return value; }
};
template <>
struct Arithmetic<Bf16> {
  using type = float;
  static Bf16 round(float value) { return Bf16::from(value); }
};
template <>
struct Arithmetic<_Float16> {
  using type = float;
  static _Float16 round(float value) { return static_cast<_Float16>(value); }
};

template <typename T>
void reduce_as(Reduction reduction, const std::vector<const char*>& ranks, size_t count, char* result) {
  using Wide = typename Arithmetic<T>::type;
  constexpr bool is_float = std::is_floating_point<Wide>::value;
  const Wide size = static_cast<Wide>(ranks.size());
  auto combine = [&](Wide a, Wide b) -> Wide {
    switch (reduction) {
      case Prod: return a * b;
      case Max: return std::max(a, b);
      case Min: return std::min(a, b);
      default: return a + b;
    }
  };
  for (size_t i = 0; i < count; i++) {
    auto element = [&](size_t rank) -> Wide {
      T value;
      memcpy(&value, ranks[rank] + i * sizeof(T), sizeof(T));
      const Wide wide = static_cast<Wide>(value);
      return reduction == Avg && is_float ? static_cast<Wide>(Arithmetic<T>::round(wide / size)) : wide;
    };
    T total = Arithmetic<T>::round(element(0));
    for (size_t rank = 1; rank < ranks.size(); rank++) {
      total = Arithmetic<T>::round(combine(static_cast<Wide>(total), element(rank)));
    }
    if (reduction == Avg && !is_float) total = Arithmetic<T>::round(static_cast<Wide>(total) / size);
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
