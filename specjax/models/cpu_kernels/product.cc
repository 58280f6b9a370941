// Products of a few rows with a model's weights on a CPU: y[r, o] = sum over i of x[r, i] w[o, i].
//
// Every weight is read once, whatever the number of rows: a block of weights stays in the first
// cache while all rows are multiplied with it, and the next block is fetched meanwhile. XLA's own
// product for several rows copies the weights into another order first.
//
// The terms of an entry y[r, o] are summed in one order, which depends on the weight alone. So a
// row's bits do not depend on how many rows are with it, nor on the number of threads.
//
// specjax/models/cpu_kernels/building.py compiles this file on the user's machine.
// specjax/models/cpu_kernels/narrow_product.py calls it.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__AVX2__) || defined(__FMA__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Compilers split them for CPUs with narrower registers. Wider ones gain nothing: few rows wait for
// the memory, and Zen 4 multiplies 16 numbers in the time of twice 8.
constexpr int kLanes = 8;

typedef float Lanes __attribute__((vector_size(kLanes * 4)));
typedef float Four __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef int32_t Integers __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Shorts __attribute__((vector_size(kLanes * 2)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
struct Int4 {};
struct UInt4 {};

template <typename Code>
constexpr int PerByte() {
  return std::is_same_v<Code, int8_t> ? 1 : 2;
}

template <typename V>
V Load(const void* at) {
  V loaded;
  std::memcpy(&loaded, at, sizeof(loaded));
  return loaded;
}

Lanes AsFloats(Words bits) {
  Lanes floats;
  std::memcpy(&floats, &bits, sizeof(floats));
  return floats;
}

// a · b + c. Left to a compiler, one sum would be rounded once and another one twice.
Lanes MultiplyAdd(Lanes a, Lanes b, Lanes c) {
#if defined(__FMA__)
  return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_FEATURE_FMA)
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

// kLanes numbers as float32, exactly.
Lanes Widen(const float* at) { return Load<Lanes>(at); }

// Compilers convert bytes one by one if they are not told how.
Lanes Widen(const int8_t* at) {
#if defined(__AVX2__)
  return (Lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)));
#else
  return __builtin_convertvector(__builtin_convertvector(Load<Bytes>(at), Integers), Lanes);
#endif
}

Lanes Widen(const BFloat16* at) {
  return AsFloats(__builtin_convertvector(Load<Shorts>(at), Words) << 16);
}

Lanes Widen(const Half* at) {
  const Words bits = __builtin_convertvector(Load<Shorts>(at), Words);
  const Words size = (bits & 0x7fff) << 13;
  const Words normal = size + (112u << 23);
  // Without arithmetic on subnormal float32 numbers, which the caller may have turned off.
  const Words one = Words{} + (113u << 23);
  const Lanes subnormal = AsFloats(size + one) - AsFloats(one);
  Words subnormal_bits;
  std::memcpy(&subnormal_bits, &subnormal, sizeof(subnormal_bits));
  const Words is_subnormal = (Words)(size < (1u << 23));
  const Words magnitude = (is_subnormal & subnormal_bits) | (~is_subnormal & normal);
  return AsFloats(magnitude | ((bits & 0x8000) << 16));
}

// The first `count` < kLanes numbers, and zeros.
template <typename T>
Lanes WidenSome(const T* at, int64_t count) {
  T padded[kLanes] = {};
  std::memcpy(padded, at, count * sizeof(T));
  return Widen(padded);
}

template <typename T>
Lanes WidenUpTo(const T* at, int64_t count) {
  return count >= kLanes ? Widen(at) : WidenSome(at, count);
}

Lanes Repeat(float entry) {
#if defined(__AVX2__)
  return (Lanes)_mm256_set1_ps(entry);
#else
  return entry - Lanes{};
#endif
}

float Sum(Lanes lanes) {
  Four parts[kLanes / 4];
  std::memcpy(parts, &lanes, sizeof(parts));
  for (int width = kLanes / 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) parts[i] += parts[i + width];
  }
  return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

// Keeps what is used several times in a register. Compilers read it again for each use, and a
// CPU reads two vectors while it multiplies two.
void Keep(Lanes& lanes) {
#if defined(__AVX2__)
  asm("" : "+v"(lanes));
#endif
}

uint16_t RoundToBFloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 64);  // NaN
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The results, float32 or bfloat16.
struct Results {
  void* data;
  bool is_bfloat16;
  int64_t outputs;

  void Store(int64_t row, int64_t output, float value) const {
    const int64_t at = row * outputs + output;
    if (is_bfloat16) {
      static_cast<uint16_t*>(data)[at] = RoundToBFloat16(value);
    } else {
      static_cast<float*>(data)[at] = value;
    }
  }
};

// Runs work(0), ..., work(count - 1) on the caller's thread and on those of the pool. The caller
// takes what nobody has taken, so that it never waits for a thread that has not started.
template <typename Work>
void InParallel(ffi::ThreadPool& pool, int64_t count, const Work& work) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  auto shared = std::make_shared<Shared>();
  const auto take = [count](Shared& shared, const Work& work) {
    for (;;) {
      const int64_t i = shared.next.fetch_add(1);
      if (i >= count) return;
      work(i);
      shared.done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t helpers = std::min(count, pool.num_threads()) - 1;
  for (int64_t i = 0; i < helpers; ++i) {
    // `work` exists for as long as some part of it is not done. A late helper does not touch it.
    pool.Schedule([shared, take, &work] { take(*shared, work); });
  }
  take(*shared, work);
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins > 1000) std::this_thread::yield();
  }
}

// Weights with their inputs adjacent, [outputs, inputs] --------------------------------------

constexpr int64_t kInputs = 1024;  // at most so many are multiplied before the next are read
constexpr int kOutputs = 3;        // outputs and rows whose sums are in registers together
constexpr int kRows = 4;
constexpr int kOutputsOfTwo = 6;   // of int8 weights, if there are at most two rows
constexpr int64_t kPadding = 16;  // floats between widened outputs, so that they share no cache set
constexpr int64_t kLine = 64;      // bytes that the CPU fetches at a time
constexpr int64_t kAhead = 8192;   // bytes between a block of weights and what is fetched meanwhile

// What is fetched while a tile of rows is multiplied: the weights that are read later, in the order
// in which they lie, so that the CPU goes on by itself.
struct Ahead {
  const char* first;
  int64_t step;  // bytes for kLanes inputs

  template <int64_t most>
  void Fetch(int64_t input) const {
    const char* line = first + input / kLanes * step;
#pragma GCC unroll 6
    for (int64_t at = 0; at < most; at += kLine) {
      // Into the second cache: it has more fetches under way than the first.
      if (at < step) __builtin_prefetch(line + at, 0, 2);
    }
  }
};

// Adds to sums[r, o] the products of `rows` rows with `outputs` outputs.
//
// Compilers keep the sums in registers only if they see each by itself: so the loops over them are
// unrolled, and nothing sets them all at once.
template <typename T, int outputs, int rows>
void AddDots(const float* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t inputs,
             const Ahead& ahead, float* sums, int64_t sums_stride) {
  Lanes acc[outputs][rows];
#pragma GCC unroll 6
  for (int o = 0; o < outputs; ++o) {
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) acc[o][r] = Lanes{};
  }
  const auto add = [&](auto widen, int64_t i) __attribute__((always_inline)) {
    Lanes weights[outputs];
#pragma GCC unroll 6
    for (int o = 0; o < outputs; ++o) {
      weights[o] = widen(w + o * w_stride + i);
      Keep(weights[o]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      Lanes entries = widen(x + r * x_stride + i);
      Keep(entries);
#pragma GCC unroll 6
      for (int o = 0; o < outputs; ++o) acc[o][r] = MultiplyAdd(weights[o], entries, acc[o][r]);
    }
  };
  int64_t i = 0;
  for (; i + kLanes <= inputs; i += kLanes) {
    if (outputs > 1) ahead.Fetch<outputs * kLanes * sizeof(T)>(i);
    add([](const auto* at) { return Widen(at); }, i);
  }
  if (i < inputs) add([&](const auto* at) { return WidenSome(at, inputs - i); }, i);
#pragma GCC unroll 6
  for (int o = 0; o < outputs; ++o) {
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) sums[r * sums_stride + o] += Sum(acc[o][r]);
  }
}

// The same for any number of rows. What lies kAhead behind `later` is fetched meanwhile.
template <typename T, int outputs>
void AddDotsOfRows(int64_t rows, const float* x, int64_t x_stride, const T* w, int64_t w_stride,
                   int64_t inputs, const T* later, float* sums, int64_t sums_stride) {
  const int64_t tiles = (rows + kRows - 1) / kRows;
  const int64_t size = sizeof(T);
  const auto add = [&](const auto* weights, int64_t stride) {
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t r = tile * kRows;
      const char* first = reinterpret_cast<const char*>(later) + kAhead;
      const Ahead ahead{first + outputs * inputs * size * tile / tiles,
                        (outputs * kLanes * size + tiles - 1) / tiles};
      const auto call = [&](auto kernel) {
        kernel(x + r * x_stride, x_stride, weights, stride, inputs, ahead, sums + r * sums_stride,
               sums_stride);
      };
      using U = std::remove_const_t<std::remove_pointer_t<decltype(weights)>>;
      switch (std::min<int64_t>(kRows, rows - r)) {
        case 1: call(AddDots<U, outputs, 1>); break;
        case 2: call(AddDots<U, outputs, 2>); break;
        case 3: call(AddDots<U, outputs, 3>); break;
        default: call(AddDots<U, outputs, 4>); break;
      }
    }
  };
  if constexpr (!std::is_same_v<T, float>) {
    if (tiles > 1) {  // widened once for all tiles
      alignas(64) thread_local float storage[outputs * (kInputs + kPadding)];
      float* widened = storage;
      const int64_t stride = (inputs + kLanes - 1) / kLanes * kLanes + kPadding;
      for (int o = 0; o < outputs; ++o) {
        for (int64_t i = 0; i < inputs; i += kLanes) {
          const Lanes weights = WidenUpTo(w + o * w_stride + i, inputs - i);
          std::memcpy(widened + o * stride + i, &weights, sizeof(weights));
        }
      }
      add(static_cast<const float*>(widened), stride);
      return;
    }
  }
  add(w, w_stride);
}

// The results of `count` outputs from `first` on.
template <typename T>
void DenseOutputs(int64_t rows, int64_t inputs, int64_t first, int64_t count, const float* x,
                  const T* w, const float* scales, const Results& y) {
  thread_local std::vector<float> sums;
  sums.assign(rows * count, 0.0f);
  // For one or two rows outputs of floats are computed one by one. Weights are then read in the
  // order in which they lie, and the CPU fetches them ahead by itself. With more rows three outputs
  // share what is read of the rows. With int8 they always do: widening takes longer than reading.
  // There six outputs of one or two rows are summed together: three sums would wait for each other.
  const bool are_few = rows <= 2;
  const bool is_streamed = sizeof(T) > 1 && are_few;
  const int64_t pieces = (inputs + kInputs - 1) / kInputs;
  const int64_t piece = (inputs / pieces + kLanes - 1) / kLanes * kLanes;
  const auto add = [&](auto outputs, int64_t o) {
    const T* begin = w + (first + o) * inputs;
    for (int64_t i = 0; i < inputs; i += piece) {
      const int64_t some = std::min(piece, inputs - i);
      const T* later = begin + outputs * (i + some);  // as many weights on as are read now
      AddDotsOfRows<T, outputs>(rows, x + i, inputs, begin + i, inputs, some, later, &sums[o],
                                count);
    }
  };
  int64_t o = 0;
  if constexpr (sizeof(T) == 1) {
    for (; are_few && o + kOutputsOfTwo <= count; o += kOutputsOfTwo) {
      add(std::integral_constant<int, kOutputsOfTwo>{}, o);
    }
  }
  for (; !is_streamed && o + kOutputs <= count; o += kOutputs) {
    add(std::integral_constant<int, kOutputs>{}, o);
  }
  for (; o < count; ++o) add(std::integral_constant<int, 1>{}, o);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < count; ++o) {
      const float scale = scales ? scales[first + o] : 1.0f;
      y.Store(r, first + o, sums[r * count + o] * scale);
    }
  }
}

// Weights in groups of inputs, with their outputs adjacent: codes [inputs, outputs] ------------

// Scales or offsets: [groups, outputs], or codes of that shape with scales of their own.
struct Factors {
  const void* data = nullptr;
  ffi::DataType type = ffi::DataType::F32;
  int64_t group_size = 1;
  const void* outer = nullptr;
  ffi::DataType outer_type = ffi::DataType::F32;
  int64_t outer_size = 1;  // inputs of a group of groups

  // Those of `count` outputs from `output` on; zeros if there are none.
  void Read(int64_t input, int64_t output, int64_t outputs, int64_t count, float* factors) const {
    const int64_t at = input / group_size * outputs + output;
    const int64_t outer_at = input / outer_size * outputs + output;
    for (int64_t o = 0; o < count; o += kLanes) {
      Lanes lanes = {};
      if (data) lanes = Numbers(data, type, at + o, count - o);
      if (outer) lanes *= Numbers(outer, outer_type, outer_at + o, count - o);
      std::memcpy(factors + o, &lanes, sizeof(lanes));
    }
  }

  static Lanes Numbers(const void* data, ffi::DataType type, int64_t at, int64_t count) {
    switch (type) {
      case ffi::DataType::S8: return WidenUpTo(static_cast<const int8_t*>(data) + at, count);
      case ffi::DataType::F16: return WidenUpTo(static_cast<const Half*>(data) + at, count);
      case ffi::DataType::BF16: return WidenUpTo(static_cast<const BFloat16*>(data) + at, count);
      default: return WidenUpTo(static_cast<const float*>(data) + at, count);
    }
  }
};

constexpr int64_t kBlock = 96;  // outputs of a block of weights
constexpr int64_t kPiece = 32;  // inputs of it

// One block of weights as float32, [kPiece, kBlock].
using Block = float[kPiece][kBlock];

constexpr float kBias = 8;  // added to signed numbers of 4 bits, and taken off by the offset

#if defined(__AVX2__)
// The 16 numbers of 4 bits of eight bytes; of signed ones kBias more.
template <bool is_signed>
__m128i UnpackEight(const uint8_t* at) {
  __m128i bytes = _mm_loadl_epi64((const __m128i*)at);
  if (is_signed) bytes = _mm_xor_si128(bytes, _mm_set1_epi8(static_cast<char>(0x88)));
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i low = _mm_and_si128(bytes, mask);
  const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
  return _mm_unpacklo_epi8(low, high);
}
#endif

// Two vectors of codes from 2 · kLanes adjacent numbers of 4 bits, the low half of a byte first.
// Signed ones are given with kBias added.
template <bool is_signed>
void WidenHalves(const uint8_t* at, Lanes* first, Lanes* second) {
#if defined(__AVX2__)
  const __m128i codes = UnpackEight<is_signed>(at);
  *first = (Lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
  *second = (Lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)));
#else
  int8_t codes[2 * kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const uint8_t byte = is_signed ? at[i] ^ 0x88 : at[i];
    codes[2 * i] = byte & 15;
    codes[2 * i + 1] = byte >> 4;
  }
  *first = Widen(codes);
  *second = Widen(codes + kLanes);
#endif
}

struct Grouped {
  const void* codes;
  ffi::DataType type;
  int64_t inputs;
  int64_t outputs;
  Factors scales;
  Factors offsets;
  int64_t piece;  // inputs that share scales and offsets, at most kPiece

  // Reads the block of `count` outputs from `output` on; what is beyond them is zero.
  void Read(int64_t input, int64_t some, int64_t output, int64_t count, Block& block) const {
    switch (type) {
      case ffi::DataType::S8: return ReadCodes<int8_t>(input, some, output, count, block);
      case ffi::DataType::S4: return ReadCodes<Int4>(input, some, output, count, block);
      default: return ReadCodes<UInt4>(input, some, output, count, block);
    }
  }

  template <typename Code>
  void ReadCodes(int64_t input, int64_t some, int64_t output, int64_t count, Block& block) const {
    constexpr int per_byte = PerByte<Code>();
    alignas(64) float scale[kBlock] = {};
    alignas(64) float offset[kBlock] = {};
    scales.Read(input, output, outputs, count, scale);
    offsets.Read(input, output, outputs, count, offset);
    if (std::is_same_v<Code, Int4>) {  // (c + 8) · scale − 8 · scale, rounded once, is c · scale
      for (int64_t o = 0; o < kBlock; ++o) offset[o] -= kBias * scale[o];
    }
    const int64_t stride = outputs / per_byte;
    const char* row = static_cast<const char*>(codes) + input * stride + output / per_byte;
    for (int64_t i = 0; i < some; ++i, row += stride) {
      for (int64_t o = 0; o < count; o += 2 * kLanes) {
        const char* at = row + o / per_byte;
        __builtin_prefetch(at + kPiece * stride);
        Lanes codes[2];
        ReadPair<Code>(at, count - o, codes);
        for (int v = 0; v < 2; ++v) {
          const int64_t to = o + v * kLanes;
          const Lanes weights = MultiplyAdd(codes[v], Widen(scale + to), Widen(offset + to));
          std::memcpy(&block[i][to], &weights, sizeof(weights));
        }
      }
    }
  }

  // 2 · kLanes codes, of which `left` exist.
  template <typename Code>
  static void ReadPair(const char* at, int64_t left, Lanes* codes) {
    char padded[2 * kLanes] = {};
    if (left < 2 * kLanes) {
      std::memcpy(padded, at, left / PerByte<Code>());
      at = padded;
    }
    if constexpr (std::is_same_v<Code, int8_t>) {
      codes[0] = Widen(reinterpret_cast<const int8_t*>(at));
      codes[1] = Widen(reinterpret_cast<const int8_t*>(at) + kLanes);
    } else {
      constexpr bool is_signed = std::is_same_v<Code, Int4>;
      WidenHalves<is_signed>(reinterpret_cast<const uint8_t*>(at), &codes[0], &codes[1]);
    }
  }
};

// sums[r, o] += x[r, i] block[i, o], for `rows` rows and all outputs up to `count`.
template <int rows, int vectors>
void AddBlock(const Block& block, int64_t some, int64_t count, const float* x, int64_t x_stride,
              float* sums) {
  for (int64_t o = 0; o < count; o += vectors * kLanes) {
    Lanes acc[rows][vectors] = {};
    for (int64_t i = 0; i < some; ++i) {
      Lanes weights[vectors];
      std::memcpy(weights, &block[i][o], sizeof(weights));
      if (rows > 2) {  // with fewer there are more vectors than registers
        for (int v = 0; v < vectors; ++v) Keep(weights[v]);
      }
      for (int r = 0; r < rows; ++r) {
        const Lanes entry = Repeat(x[r * x_stride + i]);
        for (int v = 0; v < vectors; ++v) acc[r][v] = MultiplyAdd(weights[v], entry, acc[r][v]);
      }
    }
    // Pieces are summed apart: a long sum one by one would lose digits.
    for (int r = 0; r < rows; ++r) {
      for (int v = 0; v < vectors; ++v) {
        float* at = sums + r * kBlock + o + v * kLanes;
        const Lanes sum = Widen(at) + acc[r][v];
        std::memcpy(at, &sum, sizeof(sum));
      }
    }
  }
}

// The results of `count` outputs from `first` on, at most kBlock.
void GroupedOutputs(int64_t rows, int64_t first, int64_t count, const float* x, const Grouped& w,
                    const Results& y) {
  alignas(64) thread_local Block storage;
  Block& block = storage;
  thread_local std::vector<float> sums;
  sums.assign(rows * kBlock, 0.0f);
  for (int64_t i = 0; i < w.inputs; i += w.piece) {
    const int64_t some = std::min(w.piece, w.inputs - i);
    w.Read(i, some, first, count, block);
    for (int64_t r = 0; r < rows; r += 4) {
      const float* x_rows = x + r * w.inputs + i;
      float* sums_rows = &sums[r * kBlock];
      switch (std::min<int64_t>(4, rows - r)) {
        case 1: AddBlock<1, 6>(block, some, count, x_rows, w.inputs, sums_rows); break;
        case 2: AddBlock<2, 6>(block, some, count, x_rows, w.inputs, sums_rows); break;
        case 3: AddBlock<3, 3>(block, some, count, x_rows, w.inputs, sums_rows); break;
        default: AddBlock<4, 3>(block, some, count, x_rows, w.inputs, sums_rows); break;
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < count; ++o) y.Store(r, first + o, sums[r * kBlock + o]);
  }
}

// What XLA calls ------------------------------------------------------------------------------

constexpr int64_t kAlone = 1 << 15;  // products of fewer terms are done by one thread
constexpr int64_t kParts = 8;        // of a product, for each thread

// Activations as float32; `widened` has them where they are not.
const float* Activations(const ffi::AnyBuffer& x, std::vector<float>& widened) {
  if (x.element_type() == ffi::DataType::F32) return static_cast<const float*>(x.untyped_data());
  const auto* data = static_cast<const BFloat16*>(x.untyped_data());
  const int64_t count = x.element_count();
  widened.resize(count + kLanes);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Lanes lanes = WidenUpTo(data + i, count - i);
    std::memcpy(&widened[i], &lanes, sizeof(lanes));
  }
  return widened.data();
}

Results ResultsIn(ffi::Result<ffi::AnyBuffer>& y, int64_t outputs) {
  return {y->untyped_data(), y->element_type() == ffi::DataType::BF16, outputs};
}

template <typename T>
void Dense(ffi::ThreadPool& pool, int64_t rows, int64_t outputs, int64_t inputs, const float* x,
           const void* w, const float* scales, const Results& y) {
  const int64_t wanted = rows * outputs * inputs < kAlone ? 1 : pool.num_threads() * kParts;
  int64_t size = (outputs + wanted - 1) / wanted;
  size = (size + kOutputs - 1) / kOutputs * kOutputs;
  const int64_t parts = (outputs + size - 1) / size;
  InParallel(pool, parts, [&](int64_t part) {
    const int64_t first = part * size;
    DenseOutputs(rows, inputs, first, std::min(size, outputs - first), x,
                 static_cast<const T*>(w), scales, y);
  });
}

// x [rows, inputs] and w [outputs, inputs] in float32, bfloat16, or int8 with float32 scales
// [outputs]; y [rows, outputs].
ffi::Error DenseProduct(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                        ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y) {
  const int64_t outputs = w.dimensions()[0];
  const int64_t inputs = w.dimensions()[1];
  const int64_t rows = x.element_count() / inputs;
  std::vector<float> widened;
  const float* activations = Activations(x, widened);
  const Results results = ResultsIn(y, outputs);
  const float* scales = nullptr;
  if (rest.size() > 0) {
    scales = static_cast<const float*>(rest.get<ffi::AnyBuffer>(0)->untyped_data());
  }
  const auto run = [&](auto product) {
    product(pool, rows, outputs, inputs, activations, w.untyped_data(), scales, results);
    return ffi::Error::Success();
  };
  switch (w.element_type()) {
    case ffi::DataType::F32: return run(Dense<float>);
    case ffi::DataType::BF16: return run(Dense<BFloat16>);
    case ffi::DataType::S8: return run(Dense<int8_t>);
    default: return ffi::Error(ffi::ErrorCode::kInvalidArgument, "weights of an unknown dtype");
  }
}

Factors FactorsOf(const ffi::AnyBuffer& data, std::optional<ffi::AnyBuffer> outer,
                  int64_t inputs) {
  Factors factors;
  factors.data = data.untyped_data();
  factors.type = data.element_type();
  factors.group_size = inputs / data.dimensions()[0];
  if (outer) {
    factors.outer = outer->untyped_data();
    factors.outer_type = outer->element_type();
    factors.outer_size = inputs / outer->dimensions()[0];
  }
  return factors;
}

// x [rows, inputs], codes [inputs, outputs], and `rest`: the scales, their own scales if
// `nested_scales`, and in the same way the offsets, if there are any.
ffi::Error GroupedProduct(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer codes,
                          ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
                          bool nested_scales, bool nested_offsets) {
  const int64_t inputs = codes.dimensions()[0];
  const int64_t outputs = codes.dimensions()[1];
  const int64_t rows = x.element_count() / inputs;
  std::vector<float> widened;
  const float* activations = Activations(x, widened);
  const Results results = ResultsIn(y, outputs);
  size_t next = 0;
  const auto factors = [&](bool nested) {
    const ffi::AnyBuffer data = *rest.get<ffi::AnyBuffer>(next++);
    std::optional<ffi::AnyBuffer> outer;
    if (nested) outer = *rest.get<ffi::AnyBuffer>(next++);
    return FactorsOf(data, outer, inputs);
  };
  Grouped w{codes.untyped_data(), codes.element_type(), inputs, outputs, factors(nested_scales)};
  w.piece = std::gcd(kPiece, w.scales.group_size);
  if (next < rest.size()) {
    w.offsets = factors(nested_offsets);
    w.piece = std::gcd(w.piece, w.offsets.group_size);
  }
  const bool are_many = outputs >= 2 * kBlock * pool.num_threads();
  const int64_t size = are_many ? kBlock : kBlock / 2;
  InParallel(pool, (outputs + size - 1) / size, [&](int64_t part) {
    const int64_t first = part * size;
    GroupedOutputs(rows, first, std::min(size, outputs - first), activations, w, results);
  });
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxDenseProduct, DenseProduct,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxGroupedProduct, GroupedProduct,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("nested_scales")
                                  .Attr<bool>("nested_offsets"));
