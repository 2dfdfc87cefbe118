// CPU operators for batch-1 decoding, where a step takes as long as reading the weights once.
//
// Every output element is computed with one fixed order of operations, so a row's result has the same bits whatever the
// number of rows in the call and whatever the number of threads: a verified token and a singly decoded one see the same
// logits. kernels.py has the same functions in plain PyTorch.
//
// The pattern of all linear layers: blocks of weight rows go to the threads, and a register tile of M rows of x by N rows,
// or P panels of 8 rows, of W is multiplied at a time, N and P chosen so that the sums (int4: nearly) fit in 16 vector
// registers. Float weights are used as they are stored; integer ones come in panels, in the order in which they are used.
// Vectors are GCC/Clang vector extensions; intrinsics stand only where these have no word for an instruction.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

using at::Tensor;
using OptTensor = std::optional<Tensor>;
template <int N>
using Int = std::integral_constant<int, N>;

// ---------------------------------------------------------------------------------------------------------- vectors

#define VECTOR(type, count, name) typedef type name __attribute__((vector_size(count * sizeof(type))))
VECTOR(float, 4, f32x4);
VECTOR(float, 8, f32x8);
VECTOR(int32_t, 8, i32x8);
VECTOR(uint32_t, 8, u32x8);
VECTOR(int16_t, 16, i16x16);
VECTOR(uint16_t, 16, u16x16);
VECTOR(uint16_t, 8, u16x8);
VECTOR(int8_t, 16, i8x16);
VECTOR(int8_t, 32, i8x32);
VECTOR(uint8_t, 32, u8x32);

template <class V, class T>
inline V load(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V, class T>
inline V load(const T* p, int64_t n) {  // the first n elements, then zeros
  constexpr int64_t width = sizeof(V) / sizeof(T);
  if (n >= width) return load<V>(p);
  V v{};
  if (n > 0) std::memcpy(&v, p, n * sizeof(T));
  return v;
}
template <class T, class V>
inline void store(T* p, V v) {
  std::memcpy(p, &v, sizeof v);
}
template <class V, class U>
inline V bits(U u) {
  static_assert(sizeof(V) == sizeof(U));
  return load<V>(&u);
}
inline f32x8 splat(float s) { return f32x8{s, s, s, s, s, s, s, s}; }

// a * b + c. Written out, since a compiler left to contract by itself does so in one template instance and not in the
// next, and a row's bits would depend on its neighbours: kernels.py builds with -ffp-contract=off.
inline f32x8 fma(f32x8 a, f32x8 b, f32x8 c) {
#if defined(__FMA__)
  return bits<f32x8>(_mm256_fmadd_ps(bits<__m256>(a), bits<__m256>(b), bits<__m256>(c)));
#elif defined(__aarch64__)
  for (int i = 0; i < 8; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

// Keeps a loaded vector in a register. GCC would load it again for each use, and loads are what there is least of.
template <class V>
inline V keep(V v) {
#if defined(__AVX__)
  asm("" : "+x"(v));
#endif
  return v;
}

// Integers to twice their width (GCC 12 makes five instructions of __builtin_convertvector here), and the products of
// int16 pairs, or of uint8 and int8 pairs, neighbours added: the sum of two must fit in the result's lanes.
#ifdef __AVX2__
inline i16x16 widen(i8x16 v) { return bits<i16x16>(_mm256_cvtepi8_epi16(bits<__m128i>(v))); }
inline u32x8 widen(u16x8 v) { return bits<u32x8>(_mm256_cvtepu16_epi32(bits<__m128i>(v))); }
inline i32x8 madd(i16x16 a, i16x16 b) {
  return bits<i32x8>(_mm256_madd_epi16(bits<__m256i>(a), bits<__m256i>(b)));
}
inline i16x16 madd(u8x32 a, i8x32 b) {
  return bits<i16x16>(_mm256_maddubs_epi16(bits<__m256i>(a), bits<__m256i>(b)));
}
#else
inline i16x16 widen(i8x16 v) { return __builtin_convertvector(v, i16x16); }
inline u32x8 widen(u16x8 v) { return __builtin_convertvector(v, u32x8); }
inline i32x8 madd(i16x16 a, i16x16 b) {
  i32x8 x = bits<i32x8>(a), y = bits<i32x8>(b);
  return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
}
inline i16x16 madd(u8x32 a, i8x32 b) {
  i16x16 x = bits<i16x16>(a), y = bits<i16x16>(b);
  return (x & 0xff) * (y << 8 >> 8) + (x >> 8 & 0xff) * (y >> 8);
}
#endif

// How a stored weight becomes float32: exactly.
struct F32 {
  using type = float;
  using stored = f32x8;
  static f32x8 value(f32x8 v) { return v; }
};
struct BF16 {
  using type = uint16_t;
  using stored = u16x8;
  static f32x8 value(u16x8 v) { return bits<f32x8>(widen(v) << 16); }
};
struct F16 {
  using type = uint16_t;
  using stored = u16x8;
  static f32x8 value(u16x8 v) {
#ifdef __F16C__
    return bits<f32x8>(_mm256_cvtph_ps(bits<__m128i>(v)));
#else
    u32x8 h = widen(v), magnitude = (h & 0x7fff) << 13;
    u32x8 special = (u32x8)(magnitude >= 0x0f800000) & 0x7f800000;  // infinity and NaN keep the largest exponent
    return bits<f32x8>(bits<u32x8>(bits<f32x8>(magnitude) * 0x1p112f) | special | (h & 0x8000) << 16);
#endif
  }
};
inline f32x4 fold(f32x8 v) {
  f32x4 half[2];
  std::memcpy(half, &v, sizeof v);
  return half[0] + half[1];
}
inline float sum(f32x8 v) {
  f32x4 s = fold(v);
  return (s[0] + s[2]) + (s[1] + s[3]);
}
// The sums of COUNT vectors, four at a time with sum()'s order of additions.
template <int COUNT>
inline void sums(const f32x8* v, float* out) {
  int i = 0;
#ifdef __AVX2__
  for (; i + 4 <= COUNT; i += 4) {
    __m128 a = bits<__m128>(fold(v[i])), b = bits<__m128>(fold(v[i + 1]));
    __m128 c = bits<__m128>(fold(v[i + 2])), d = bits<__m128>(fold(v[i + 3]));
    __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
    __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
    _mm_storeu_ps(out + i, _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
  }
#endif
  for (; i < COUNT; i++) out[i] = sum(v[i]);
}

// exp to about 1 ulp: 2^n times a polynomial in what remains. 0 below -87, infinity above 88; NaN stays NaN.
inline f32x8 exp8(f32x8 x) {
  const f32x8 magic = splat(0x1.8p23f);  // adding and subtracting it rounds to an integer
  f32x8 shifted = fma(x, splat(1.44269504f), magic), n = shifted - magic;
  f32x8 r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
  f32x8 p = fma(splat(1.0f / 5040), r, splat(1.0f / 720));
  p = fma(fma(fma(p, r, splat(1.0f / 120)), r, splat(1.0f / 24)), r, splat(1.0f / 6));
  p = fma(fma(fma(p, r, splat(0.5f)), r, splat(1.0f)), r, splat(1.0f));
  f32x8 y = p * bits<f32x8>((bits<i32x8>(shifted) + 127) << 23);
  y = x < -87.0f ? splat(0) : y;
  return x > 88.0f ? splat(INFINITY) : y;
}

// ---------------------------------------------------------------------------------------------------- tensors as rows

template <class T>
const T* data(const OptTensor& t, const char* name, at::ScalarType type, at::IntArrayRef shape) {
  if (!t) return nullptr;
  TORCH_CHECK(t->scalar_type() == type && t->sizes() == shape && t->is_contiguous(), "onepass: ", name,
              " must be contiguous ", type, " ", shape, ", not ", t->scalar_type(), " ", t->sizes());
  return (const T*)t->const_data_ptr();
}

Tensor rows_of(const Tensor& x, int64_t K) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.dim() >= 1 && x.size(-1) == K,
              "onepass: x must be float32 and its last dimension must be ", K, ", not ", x.scalar_type(), " ", x.sizes());
  return x.contiguous();
}

Tensor like(const Tensor& x, int64_t columns) {
  auto sizes = x.sizes().vec();
  sizes.back() = columns;
  return at::empty(sizes, x.options());
}

template <class T>
T* scratch(int64_t n) {  // one growing buffer per thread and type
  static thread_local std::vector<T> buffer;
  if ((int64_t)buffer.size() < n) buffer.resize(n);
  return buffer.data();
}

// f(m) for every row, over the threads when there is enough work of `cost` elements a row.
template <class F>
void over_rows(int64_t rows, int64_t cost, F f) {
  at::parallel_for(0, rows, std::max<int64_t>(1, 16384 / (cost + 1)), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m++) f(m);
  });
}

void normalize(const float* x, const float* weight, int64_t D, double eps, float* y) {
  f32x8 squares{};
  for (int64_t d = 0; d < D; d += 8) {
    f32x8 v = load<f32x8>(x + d, D - d);
    squares = fma(v, v, squares);
  }
  float factor = 1.0f / std::sqrt(sum(squares) / D + (float)eps);
  for (int64_t d = 0; d < D; d++) y[d] = x[d] * factor * weight[d];
}

Tensor rms_norm(const Tensor& x_, const Tensor& weight_, double eps) {
  int64_t D = x_.size(-1);
  Tensor x = rows_of(x_, D), y = like(x, D), weight = weight_.to(at::kFloat);
  const float *in = x.const_data_ptr<float>(), *w = data<float>(weight, "the norm's weight", at::kFloat, {D});
  float* out = y.mutable_data_ptr<float>();
  over_rows(x.numel() / D, D, [&](int64_t m) { normalize(in + m * D, w, D, eps, out + m * D); });
  return y;
}

Tensor silu_mul(const Tensor& x_) {
  int64_t I = x_.size(-1) / 2;
  Tensor x = rows_of(x_, 2 * I), y = like(x, I);
  const float* in = x.const_data_ptr<float>();
  float* out = y.mutable_data_ptr<float>();
  over_rows(x.numel() / (2 * I), 4 * I, [&](int64_t m) {
    for (int64_t i = 0; i < I; i += 8) {
      const float* p = in + m * 2 * I + i;
      f32x8 gate = load<f32x8>(p, I - i), up = load<f32x8>(p + I, I - i);
      f32x8 v = gate / (1.0f + exp8(-gate)) * up;
      std::memcpy(out + m * I + i, &v, std::min<int64_t>(8, I - i) * sizeof(float));
    }
  });
  return y;
}

// ------------------------------------------------------------------------------------------------------------ linear

constexpr int STRIP = 6;       // at most so many rows of x in a tile; more are strips, one after the other
constexpr int64_t BLOCK = 24;  // weight rows handled together when x has several strips: they stay in the cache meanwhile

// y [M, N] = x [M, K] W^T + bias + residual, for a W of any kind.
struct Work {
  int64_t M, N, K;
  const float *x, *bias, *residual;
  float* y;
  Tensor input, output;  // own x and y
};

// A layer's input may be the RMS norm or the silu_mul of x, and a residual be added to its output: done here, a decode
// step makes 150 calls in its layers and not 300.
Work start(const Tensor& x, int64_t N, int64_t K, const OptTensor& bias, const OptTensor& norm, double eps, bool gated,
           const OptTensor& residual) {
  Tensor input = rows_of(gated ? silu_mul(x) : norm ? rms_norm(x, *norm, eps) : x, K), y = like(input, N);
  return {input.numel() / K, N, K, input.const_data_ptr<float>(), data<float>(bias, "bias", at::kFloat, {N}),
          data<float>(residual, "residual", at::kFloat, y.sizes()), y.mutable_data_ptr<float>(), input, y};
}

// f(n0, n1) for blocks of weight rows, over the threads. `small`: x has several strips, each of which passes over a block,
// so it is `size` rows and stays in the cache. Otherwise a thread's whole share is one block, and its streams lie far apart.
template <class F>
void over_blocks(const Work& work, int64_t size, bool small, F f) {
  int64_t grain = std::max<int64_t>(1, 64000 / (work.M * work.K * size + 1));
  at::parallel_for(0, (work.N + size - 1) / size, grain, [&](int64_t begin, int64_t end) {
    const int64_t step = small ? 1 : end - begin;
    for (int64_t b = begin; b < end; b += step) f(b * size, std::min(work.N, (b + step) * size));
  });
}

// f(at), where at[0 .. N-1] are places of N streams that together cover 0 .. count - 1. A core reads four streams of
// memory that lie far apart faster than four neighbours, which are one stream: a float32 step takes 2/3 of the time.
// (Software prefetch would undo that.) Where N does not divide, the last streams overlap, and a place is computed twice, to
// the same bits.
template <int N, class F>
inline void over_streams(int64_t count, F f) {
  const int64_t length = (count + N - 1) / N;
  for (int64_t i = 0; i < length; i++) {
    int64_t at[N];
    for (int n = 0; n < N; n++) at[n] = std::min(n * length, count - length) + i;
    f(at);
  }
}

// f(M, m) for strips of M rows, a compile-time constant.
template <class F>
inline void for_rows(int64_t rows, F f) {
  int64_t m = 0;
  for (; m + STRIP <= rows; m += STRIP) f(Int<STRIP>(), m);
  switch (rows - m) {
    case 1: return f(Int<1>(), m);
    case 2: return f(Int<2>(), m);
    case 3: return f(Int<3>(), m);
    case 4: return f(Int<4>(), m);
    case 5: return f(Int<5>(), m);
  }
}

// The functions that hold a loop over K are not inlined: on its own, each gets its registers allocated well.
template <int M, int N, class W>
__attribute__((noinline)) void tile_float(const Work& work, int64_t m0, int64_t n0, const int64_t (&at)[N],
                                          const typename W::type* block) {
  const int64_t K = work.K;
  const float* x = work.x + m0 * K;
  const typename W::type* w[N];
  for (int n = 0; n < N; n++) w[n] = block + at[n] * K;
  f32x8 acc[M][N] = {};
  auto multiply = [&](int64_t k, int64_t count) {
    f32x8 wv[N];
    for (int n = 0; n < N; n++) wv[n] = W::value(load<typename W::stored>(w[n] + k, count));
    for (int m = 0; m < M; m++) {
      f32x8 xv = keep(load<f32x8>(x + m * K + k, count));
      for (int n = 0; n < N; n++) acc[m][n] = fma(xv, wv[n], acc[m][n]);
    }
  };
  int64_t k = 0;
  for (; k + 8 <= K; k += 8) multiply(k, 8);
  if (k < K) multiply(k, K - k);
  float s[M * N];
  sums<M * N>(&acc[0][0], s);
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) {
      int64_t column = n0 + at[n], to = (m0 + m) * work.N + column;
      float v = s[m * N + n] + (work.bias ? work.bias[column] : 0.0f);
      work.y[to] = v + (work.residual ? work.residual[to] : 0.0f);
    }
}

// Columns n0 .. n1 from weight rows that begin at w.
template <class W>
void multiply_float(const Work& work, int64_t n0, int64_t n1, const typename W::type* w) {
  for_rows(work.M, [&](auto M, int64_t m) {
    constexpr int widths[] = {4, 4, 3, 3, 2, 2}, N = widths[M - 1];
    over_streams<N>(n1 - n0, [&](const int64_t (&at)[N]) { tile_float<M, N, W>(work, m, n0, at, w); });
  });
}

template <class W>
Tensor run_float(const Work& work, const void* weight) {
  over_blocks(work, BLOCK, work.M > STRIP, [&](int64_t n0, int64_t n1) {
    multiply_float<W>(work, n0, n1, (const typename W::type*)weight + n0 * work.K);
  });
  return work.output;
}

Tensor linear(const Tensor& x, const Tensor& weight, const OptTensor& bias, const OptTensor& norm, double eps, bool gated,
              const OptTensor& residual) {
  TORCH_CHECK(weight.dim() == 2 && weight.numel() > 0 && weight.is_contiguous(),
              "onepass: weight must be contiguous [N, K], not ", weight.sizes(), " with strides ", weight.strides());
  Work work = start(x, weight.size(0), weight.size(1), bias, norm, eps, gated, residual);
  if (weight.scalar_type() == at::kFloat) return run_float<F32>(work, weight.const_data_ptr());
  if (weight.scalar_type() == at::kBFloat16) return run_float<BF16>(work, weight.const_data_ptr());
  TORCH_CHECK(weight.scalar_type() == at::kHalf, "onepass: weight must be float32, bfloat16 or float16, not ",
              weight.scalar_type());
  return run_float<F16>(work, weight.const_data_ptr());
}

// ------------------------------------------------------------------------------------ linear layers of integer weights

// Integer weights come in panels of 8 rows (kernels.int8_panels and int4_panels). What the rows have in the same columns
// lies side by side: a vector's lanes are rows, so that nothing is added across lanes.

constexpr int64_t PANEL = 8;

// x as integers: row m is q[m] * scale[m], with q padded with zeros to ld. int4 takes q in two signed bytes,
// q = 256 * high + low, and `sums`, the sum of each group of q.
struct Quantized {
  int64_t ld, groups;
  std::vector<int16_t> q;
  std::vector<int8_t> high, low;
  std::vector<float> scale, sums;
};

Quantized quantize(const Work& work, int64_t groups) {
  const int64_t M = work.M, K = work.K, ld = (K + 15) / 16 * 16;
  Quantized r{ld, groups};
  r.q.resize(M * ld), r.scale.resize(M), r.sums.resize(M * groups);
  if (groups) r.high.resize(M * ld), r.low.resize(M * ld);
  over_rows(M, K, [&](int64_t m) {
    const float* x = work.x + m * K;
    int16_t* q = &r.q[m * ld];
    f32x8 largest{}, zero{};  // zero becomes NaN where an x is not finite
    for (int64_t k = 0; k < K; k += 8) {
      f32x8 v = load<f32x8>(x + k, K - k), size = bits<f32x8>(bits<u32x8>(v) & 0x7fffffffu);
      largest = size > largest ? size : largest;
      zero += v * 0.0f;
    }
    const float top = *std::max_element((float*)&largest, (float*)&largest + 8), most = 32639;  // 127 * 256 + 127
    bool usable = top > 1e-30f && top < INFINITY;
    r.scale[m] = (usable ? top / most : 0.0f) + sum(zero);
    const f32x8 inverse = splat(usable ? most / top : 0.0f);
    for (int64_t k = 0; k < ld; k += 8) {
      // With 1.5 * 2^23 added, the low 16 bits of a float are the integer nearest to what it was.
      u32x8 v = bits<u32x8>(fma(load<f32x8>(x + k, K - k), inverse, splat(0x1.8p23f)));
      store(q + k, __builtin_convertvector(v & 0xffffu, u16x8));
    }
    for (int64_t g = 0; g < groups; g++) {
      i32x8 s{};
      for (int64_t k = g * (K / groups); k < (g + 1) * (K / groups); k += 16) {
        i16x16 v = load<i16x16>(q + k);
        s += madd(v, i16x16{} + 1);
        store(&r.high[m * ld + k], __builtin_convertvector((v + 128) >> 8, i8x16));
        store(&r.low[m * ld + k], __builtin_convertvector(v, i8x16));
      }
      r.sums[m * groups + g] = sum(__builtin_convertvector(s, f32x8));  // exact: below 2^24
    }
  });
  return r;
}

// Four bytes of x, for every row of a panel.
template <class V, class T>
inline V four(const T* p) {
  return bits<V>(i32x8{} + load<int32_t>(p));
}

// The products of P panels, that begin at w[0 .. P-1], and M rows of x. int8: two weights of each row side by side.
template <int M, int P>
__attribute__((noinline)) void multiply_int8(const Quantized& r, int64_t m0, const char* const (&w)[P], int64_t K,
                                             f32x8 (&y)[M][P]) {
  const int16_t* x = &r.q[m0 * r.ld];
  for (int64_t k0 = 0; k0 < K; k0 += 512) {  // int32 sums of at most 512 * 128 * 32639 < 2^31
    const int64_t k1 = std::min(K, k0 + 512);
    i32x8 part[M][P] = {};
    for (int64_t k = k0; k < k1; k += 2) {
      i16x16 wv[P];
      for (int p = 0; p < P; p++) wv[p] = widen(load<i8x16>(w[p] + k * PANEL));
      for (int m = 0; m < M; m++) {
        i16x16 xv = keep(four<i16x16>(x + m * r.ld + k));
        for (int p = 0; p < P; p++) part[m][p] += madd(wv[p], xv);
      }
    }
    for (int m = 0; m < M; m++)
      for (int p = 0; p < P; p++) y[m][p] += __builtin_convertvector(part[m][p], f32x8);
  }
}

// int4: a group is blocks of 32 columns, then the 8 rows' scales and mins, as float16. A block has 16 bytes of each row, as
// four times 4 bytes of all 8 rows; byte j of a row has weight j in its low nibble and weight j + 16 in the high one. Of
// w = q * scale + min the second term needs only the sum of the group's x.
template <int M, int P>
__attribute__((noinline)) void multiply_int4(const Quantized& r, int64_t m0, const char* const (&panels)[P], int64_t K,
                                             f32x8 (&y)[M][P]) {
  constexpr int Q = M == 1 ? P : M == 2 ? 2 : 1;  // panels that share what is read of x
  const int64_t group = K / r.groups, bytes = (group / 2 + 4) * PANEL;
  for (int64_t g = 0; g < r.groups; g++)
    for (int p = 0; p < P; p += Q) {
      const char* w[Q];
      for (int q = 0; q < Q; q++) w[q] = panels[p + q] + g * bytes;
      i32x8 part[M][Q] = {};
      for (int64_t k = g * group; k < (g + 1) * group; k += 32) {
        i16x16 upper[M][Q] = {}, lower[M][Q] = {};  // sums of at most 16 * 15 * 128 < 2^15
#pragma GCC unroll 1
        for (int i = 0; i < 16; i += 4) {
          u8x32 low[Q], high[Q];
          for (int q = 0; q < Q; q++) {
            u8x32 v = load<u8x32>(w[q] + i * PANEL);
            low[q] = v & 15;
            high[q] = bits<u8x32>(bits<u16x16>(v) >> 4) & 15;
          }
          for (int m = 0; m < M; m++) {
            const int8_t *h = &r.high[(m0 + m) * r.ld + k + i], *l = &r.low[(m0 + m) * r.ld + k + i];
            for (int q = 0; q < Q; q++) {
              upper[m][q] += madd(low[q], four<i8x32>(h)) + madd(high[q], four<i8x32>(h + 16));
              lower[m][q] += madd(low[q], four<i8x32>(l)) + madd(high[q], four<i8x32>(l + 16));
            }
          }
        }
        for (int q = 0; q < Q; q++) {
          w[q] += 16 * PANEL;
          for (int m = 0; m < M; m++) part[m][q] += madd(upper[m][q], i16x16{} + 256) + madd(lower[m][q], i16x16{} + 1);
        }
      }
      for (int q = 0; q < Q; q++) {
        f32x8 scale = F16::value(load<u16x8>(w[q])), min = F16::value(load<u16x8>(w[q] + 2 * PANEL));
        for (int m = 0; m < M; m++) {
          f32x8 product = fma(__builtin_convertvector(part[m][q], f32x8), scale, y[m][p + q]);
          y[m][p + q] = fma(splat(r.sums[(m0 + m) * r.groups + g]), min, product);
        }
      }
    }
}

// y = multiply(panels, x) * x's scale * `scales` + bias + residual, WIDE panels at a time for strips of up to 3 rows of x,
// NARROW for longer ones. `scales`, one for each weight row, is null for int4, whose panels hold them.
template <int WIDE, int NARROW, class F>
Tensor over_panels(const Work& work, const Quantized& r, const Tensor& panels, const float* scales, F multiply) {
  const char* weights = (const char*)panels.const_data_ptr();
  const int64_t bytes = panels.nbytes() / panels.size(0);
  over_blocks(work, 4 * PANEL, work.M > STRIP, [&](int64_t n0, int64_t n1) {
    for_rows(work.M, [&](auto M, int64_t m0) {
      constexpr int P = M <= 3 ? WIDE : NARROW;
      over_streams<P>((n1 - n0 + PANEL - 1) / PANEL, [&](const int64_t (&at)[P]) {
        const char* w[P];
        for (int p = 0; p < P; p++) w[p] = weights + (n0 / PANEL + at[p]) * bytes;
        f32x8 sums[M][P] = {};
        multiply(m0, w, sums);
        for (int m = 0; m < M; m++)
          for (int p = 0; p < P; p++) {
            const int64_t n = n0 + at[p] * PANEL, to = (m0 + m) * work.N + n, left = work.N - n;
            f32x8 scale = splat(r.scale[m0 + m]), v = sums[m][p] * (scales ? scale * load<f32x8>(scales + n, left) : scale);
            if (work.bias) v += load<f32x8>(work.bias + n, left);
            if (work.residual) v += load<f32x8>(work.residual + to, left);
            if (left >= PANEL) store(work.y + to, v);
            else std::memcpy(work.y + to, &v, left * sizeof(float));
          }
      });
    });
  });
  return work.output;
}

Tensor linear_int8(const Tensor& x, const Tensor& panels, const Tensor& scales, const OptTensor& bias,
                   const OptTensor& norm, double eps, bool gated, const OptTensor& residual) {
  const int64_t N = scales.numel(), K = panels.dim() == 4 ? 2 * panels.size(1) : 0;
  TORCH_CHECK(N > 0 && K > 0, "onepass: panels must be int8 [panels, K / 2, 8, 2], not ", panels.sizes());
  data<int8_t>(panels, "panels", at::kChar, {(N + PANEL - 1) / PANEL, K / 2, PANEL, 2});
  Work work = start(x, N, K, bias, norm, eps, gated, residual);
  const Quantized r = quantize(work, 0);
  const float* scale = data<float>(scales, "scales", at::kFloat, {N});
  return over_panels<4, 2>(work, r, panels, scale, [&](int64_t m, auto& w, auto& y) { multiply_int8(r, m, w, K, y); });
}

Tensor linear_int4(const Tensor& x, const Tensor& panels, int64_t N, const OptTensor& bias, const OptTensor& norm,
                   double eps, bool gated, const OptTensor& residual) {
  TORCH_CHECK(N > 0 && panels.dim() == 3 && panels.size(1) > 0, "onepass: panels must be int32 [panels, groups, words], not ",
              panels.sizes());
  const int64_t groups = panels.size(1), words = panels.size(2), group = words - PANEL;
  TORCH_CHECK((group == 32 || group == 64 || group == 128),
              "onepass: the int4 group size must be 32, 64 or 128, not ", group);
  data<int32_t>(panels, "panels", at::kInt, {(N + PANEL - 1) / PANEL, groups, words});
  Work work = start(x, N, groups * group, bias, norm, eps, gated, residual);
  const Quantized r = quantize(work, groups);
  return over_panels<4, 4>(work, r, panels, nullptr, [&](int64_t m, auto& w, auto& y) { multiply_int4(r, m, w, work.K, y); });
}

// --------------------------------------------------------------------------------------------------------- attention

constexpr int64_t POSITIONS = 64;  // cache positions per step of the running softmax
constexpr int64_t TOKENS = 4;      // new tokens per task

// y[r] = y[r] * factor[r] + sum over p of s[r][p] * v[p], positions in order, for R rows and 8 * C of their D columns.
template <int R, int C>
__attribute__((noinline)) void add_values(const float* s, const float* factor, const float* v, int64_t n, int64_t D, float* y) {
  f32x8 acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = load<f32x8>(y + r * D + 8 * c) * factor[r];
  for (int64_t p = 0; p < n; p++) {
    f32x8 sv[R];
    for (int r = 0; r < R; r++) sv[r] = splat(s[r * POSITIONS + p]);
    for (int c = 0; c < C; c++) {
      f32x8 vv = keep(load<f32x8>(v + p * D + 8 * c));
      for (int r = 0; r < R; r++) acc[r][c] = fma(vv, sv[r], acc[r][c]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(y + r * D + 8 * c, acc[r][c]);
}

template <int R>
void add_values(const float* s, const float* factor, const float* v, int64_t n, int64_t D, float* y) {
  int64_t d = 0;
  for (; d + 32 <= D; d += 32) add_values<R, 4>(s, factor, v + d, n, D, y + d);
  for (; d < D; d += 8) add_values<R, 1>(s, factor, v + d, n, D, y + d);
}

// One row's step of the running softmax (Milakov and Gimelshein 2018, section 3): its n scores become exponentials
// relative to the largest score so far. Returns the factor for what was summed before.
float soften(float* s, int64_t n, float& top, float& total) {
  std::fill(s + n, s + (n + 7) / 8 * 8, -INFINITY);
  f32x8 largest = splat(top), t{};
  for (int64_t p = 0; p < n; p += 8) {
    f32x8 v = load<f32x8>(s + p);
    largest = v > largest ? v : largest;
  }
  float now = *std::max_element((float*)&largest, (float*)&largest + 8), factor = exp8(splat(top - now))[0];
  for (int64_t p = 0; p < n; p += 8) {
    f32x8 v = exp8(load<f32x8>(s + p) - now);
    t += v;
    store(s + p, v);
  }
  top = now;
  total = total * factor + sum(t);
  return factor;
}

// Attention of rows of queries that share one key-value head, each over positions 0 .. pos[row]. The steps lie at fixed
// positions, so that a row's sums do not depend on the rows beside it.
void attend(const float* q, const int64_t* pos, int64_t rows, const float* keys, const float* values, int64_t D, float* y) {
  std::vector<float> top(rows, -INFINITY), total(rows), factor(rows), ones(rows, 1.0f), scores(rows * POSITIONS);
  std::vector<int64_t> n(rows);  // positions of this step that the row sees
  std::fill(y, y + rows * D, 0.0f);
  const int64_t last = *std::max_element(pos, pos + rows);
  for (int64_t p0 = 0; p0 <= last; p0 += POSITIONS) {
    const float* v = values + p0 * D;
    Work product{rows, POSITIONS, D, q, nullptr, nullptr, scores.data(), {}, {}};
    multiply_float<F32>(product, 0, std::min(POSITIONS, last + 1 - p0), keys + p0 * D);
    for (int64_t r = 0; r < rows; r++) {
      n[r] = std::clamp<int64_t>(pos[r] + 1 - p0, 0, POSITIONS);
      factor[r] = n[r] ? soften(&scores[r * POSITIONS], n[r], top[r], total[r]) : 1.0f;
    }
    int64_t r = 0;
    for (; r + 3 <= rows; r += 3) {
      int64_t common = std::min({n[r], n[r + 1], n[r + 2]});
      add_values<3>(&scores[r * POSITIONS], &factor[r], v, common, D, y + r * D);
      for (int64_t i = r; i < r + 3; i++)  // positions that one row sees and its neighbour does not
        if (n[i] > common) add_values<1>(&scores[i * POSITIONS + common], &ones[i], v + common * D, n[i] - common, D, y + i * D);
    }
    for (; r < rows; r++) add_values<1>(&scores[r * POSITIONS], &factor[r], v, n[r], D, y + r * D);
  }
  for (int64_t r = 0; r < rows; r++)
    for (int64_t d = 0; d < D; d++) y[r * D + d] /= total[r];
}

// One head's vector: an RMS norm if it has one, then the rotation of the pairs (i, i + D/2), then a factor.
void prepare_head(const float* x, const float* norm, double eps, const float* rope, int64_t D, float factor, float* y) {
  float* from = scratch<float>(D);
  if (norm) normalize(x, norm, D, eps, from);
  else std::copy_n(x, D, from);
  for (int64_t i = 0; i < D / 2; i++) {
    float c = rope[2 * i] * factor, s = rope[2 * i + 1] * factor, a = from[i], b = from[i + D / 2];
    y[i] = a * c - b * s;
    y[i + D / 2] = b * c + a * s;
  }
}

Tensor attention(const Tensor& qkv_, const Tensor& rope, const Tensor& k_cache, const Tensor& v_cache,
                 const Tensor& input_pos_, const OptTensor& q_norm, const OptTensor& k_norm, double eps) {
  TORCH_CHECK(qkv_.dim() == 3 && k_cache.dim() == 4 && rope.dim() == 3 && qkv_.size(0) <= k_cache.size(0),
              "onepass: qkv must be [B, S, (H + 2 Hkv) D], the caches [>= B, Hkv, T, D], rope [T, D/2, 2], not ",
              qkv_.sizes(), ", ", k_cache.sizes(), ", ", rope.sizes());
  const int64_t B = qkv_.size(0), S = qkv_.size(1), width = qkv_.size(2), Hkv = k_cache.size(1), T = k_cache.size(2),
                D = k_cache.size(3), H = width / D - 2 * Hkv, G = H / Hkv;
  TORCH_CHECK(D % 8 == 0 && H > 0 && H % Hkv == 0 && width == (H + 2 * Hkv) * D && rope.size(0) >= T,
              "onepass: ", width, " columns of qkv are not heads for ", Hkv, " key-value heads of ", D,
              " (a multiple of 8), or rope has less than ", T, " positions");
  Tensor qkv = rows_of(qkv_, width), input_pos = input_pos_.contiguous(), y = at::empty({B, S, H * D}, qkv.options());
  auto floats = [&](const OptTensor& t) { return t ? OptTensor(t->to(at::kFloat)) : t; };
  const OptTensor q_weight = floats(q_norm), k_weight = floats(k_norm);
  const float *qw = data<float>(q_weight, "q_norm", at::kFloat, {D}), *kw = data<float>(k_weight, "k_norm", at::kFloat, {D});
  const float* angles = data<float>(rope, "rope", at::kFloat, {rope.size(0), D / 2, 2});
  float* keys = (float*)data<float>(k_cache, "k_cache", at::kFloat, k_cache.sizes());
  float* values = (float*)data<float>(v_cache, "v_cache", at::kFloat, k_cache.sizes());
  const int64_t* pos = data<int64_t>(input_pos, "input_pos", at::kLong, {B, S});
  for (int64_t i = 0; i < B * S; i++)
    TORCH_CHECK_INDEX(pos[i] >= 0 && pos[i] < T, "onepass: position ", pos[i], " is outside the cache, which has ", T,
                      " positions");
  const float* x = qkv.const_data_ptr<float>();
  float* out = y.mutable_data_ptr<float>();
  if (B * S == 0) return y;

  over_rows(B * S, 4 * Hkv * D, [&](int64_t i) {
    for (int64_t h = 0; h < Hkv; h++) {
      int64_t to = ((i / S * Hkv + h) * T + pos[i]) * D;
      prepare_head(x + i * width + (H + h) * D, kw, eps, angles + pos[i] * D, D, 1.0f, keys + to);
      std::copy_n(x + i * width + (H + Hkv + h) * D, D, values + to);
    }
  });
  const int64_t chunks = (S + TOKENS - 1) / TOKENS;
  // A thread gets tasks of at least 100,000 products together: fewer are not worth its start.
  const int64_t most = *std::max_element(pos, pos + B * S), grain = std::max<int64_t>(1, 100000 / (2 * G * std::min(S, TOKENS) * D * (most + 1)));
  at::parallel_for(0, B * Hkv * chunks, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> q(TOKENS * G * D), result(TOKENS * G * D);
    std::vector<int64_t> limits(TOKENS * G);
    for (int64_t task = begin; task < end; task++) {
      int64_t b = task / (Hkv * chunks), h = task / chunks % Hkv, s0 = task % chunks * TOKENS;
      int64_t rows = std::min(TOKENS, S - s0) * G, cache = (b * Hkv + h) * T * D;
      for (int64_t r = 0; r < rows; r++) {
        int64_t i = b * S + s0 + r / G;
        limits[r] = pos[i];
        prepare_head(x + i * width + (h * G + r % G) * D, qw, eps, angles + pos[i] * D, D, 1.0f / std::sqrt((float)D), &q[r * D]);
      }
      attend(q.data(), limits.data(), rows, keys + cache, values + cache, D, result.data());
      for (int64_t r = 0; r < rows; r++)
        std::copy_n(&result[r * D], D, out + ((b * S + s0 + r / G) * H + h * G + r % G) * D);
    }
  });
  return y;
}

// ------------------------------------------------------------------------------------------------ transformer blocks

// All blocks of a model: the operators above, in the order in which model.py has them. What each call from Python costs
// beside its work adds up to a quarter of a step, since by then the weights have driven Python out of the processor's
// cache. `parts` has, block after block, the 18 tensors that `kernels.blocks` describes.
Tensor all_blocks(const Tensor& x, const Tensor& rope, const Tensor& input_pos, const std::vector<OptTensor>& parts, double eps) {
  constexpr int64_t PARTS = 18;
  TORCH_CHECK(parts.size() % PARTS == 0, "onepass: a block has ", PARTS, " parts; ", parts.size(), " are no multiple of it");
  Tensor y = x;
  for (int64_t at = 0; at < (int64_t)parts.size(); at += PARTS) {
    const OptTensor* part = &parts[at];
    auto layer = [&](int64_t i, const Tensor& x, const OptTensor& norm, bool gated, const OptTensor& residual) {
      const Tensor& weight = part[i].value();
      const OptTensor &scales = part[i + 1], &bias = part[i + 2];
      if (scales) return linear_int8(x, weight, *scales, bias, norm, eps, gated, residual);
      if (weight.scalar_type() == at::kInt)
        return linear_int4(x, weight, PANEL * weight.size(0), bias, norm, eps, gated, residual);
      return linear(x, weight, bias, norm, eps, gated, residual);
    };
    Tensor qkv = layer(6, y, part[2], false, {});
    Tensor mixed = attention(qkv, rope, part[0].value(), part[1].value(), input_pos, part[4], part[5], eps);
    y = layer(9, mixed, {}, false, y);
    y = layer(15, layer(12, y, part[3], false, {}), {}, true, y);
  }
  return y;
}

Tensor blocks(const Tensor& x, const Tensor& rope, const Tensor& input_pos, const c10::List<OptTensor>& parts, double eps) {
  return all_blocks(x, rope, input_pos, parts.vec(), eps);
}

// The same with parts that were handed over once, and are called by a number since. Python threads come here without
// Python's lock, and a pass goes on with parts that are released meanwhile.
std::mutex lock;
std::map<int64_t, std::shared_ptr<const std::vector<OptTensor>>> held;

void hold(int64_t number, const c10::List<OptTensor>& parts) {
  auto kept = std::make_shared<const std::vector<OptTensor>>(parts.vec());
  std::lock_guard guard(lock);
  held[number] = std::move(kept);
}

void release(int64_t number) {
  std::lock_guard guard(lock);
  held.erase(number);
}

Tensor held_blocks(const Tensor& x, const Tensor& rope, const Tensor& input_pos, int64_t number, double eps) {
  std::unique_lock guard(lock);
  TORCH_CHECK(held.count(number), "onepass: no blocks are held under ", number);
  auto parts = held[number];
  guard.unlock();
  return all_blocks(x, rope, input_pos, *parts, eps);
}

}  // namespace

// attention and blocks write to the caches without saying so in their schemas. Said, torch.compile would functionalize the call, for
// which nested_compile_region has no way (torch 2.13), and which elsewhere may copy the caches. It is sound as long as
// nothing else in a compiled graph touches a cache: the call is never dropped, since its result is used, nor moved past
// another of the same layer.
#define AROUND "Tensor? bias, Tensor? norm, float eps, bool gated, Tensor? residual) -> Tensor"
TORCH_LIBRARY(onepass, m) {
  m.def("linear(Tensor x, Tensor weight, " AROUND);
  m.def("linear_int8(Tensor x, Tensor panels, Tensor scales, " AROUND);
  m.def("linear_int4(Tensor x, Tensor panels, int rows, " AROUND);
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("silu_mul(Tensor x) -> Tensor");
  m.def("attention(Tensor qkv, Tensor rope, Tensor k_cache, Tensor v_cache, Tensor input_pos, Tensor? q_norm, "
        "Tensor? k_norm, float eps) -> Tensor");
  m.def("blocks(Tensor x, Tensor rope, Tensor input_pos, Tensor?[] parts, float eps) -> Tensor");
  m.def("held_blocks(Tensor x, Tensor rope, Tensor input_pos, int number, float eps) -> Tensor");
  m.def("hold(int number, Tensor?[] parts) -> ()", hold);
  m.def("release(int number) -> ()", release);
}

TORCH_LIBRARY_IMPL(onepass, CPU, m) {
  m.impl("linear", linear);
  m.impl("linear_int8", linear_int8);
  m.impl("linear_int4", linear_int4);
  m.impl("rms_norm", rms_norm);
  m.impl("silu_mul", silu_mul);
  m.impl("attention", attention);
  m.impl("blocks", blocks);
  m.impl("held_blocks", held_blocks);
}
