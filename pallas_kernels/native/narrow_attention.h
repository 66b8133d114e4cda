// Attention of few query rows, or of rows that depend on no other: keys fill vectors, and each score is a dot product.
#pragma once

#include "attention_tiles.h"

namespace jaxllm::JAXLLM_ISA {

typedef Part<4>::Lanes Four;

template <int kFirst, int kSecond, int kThird, int kFourth>
static inline Four pick(Four a, Four b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kFirst, kSecond, kThird, kFourth);
#else
  typedef int32_t Indices __attribute__((vector_size(16)));
  return __builtin_shuffle(a, b, Indices{kFirst, kSecond, kThird, kFourth});
#endif
}

template <int kLanes>
static inline typename Part<kLanes / 2>::Lanes add_halves(typename Part<kLanes>::Lanes v) {
  typename Part<kLanes / 2>::Lanes half[2];
  std::memcpy(half, &v, sizeof v);
  return half[0] + half[1];
}

// The sum of each vector's lanes: halves are added until four lanes are left, then what these have at the same place.
template <int kLanes, class Lanes>
static inline Four sums_of_four(Lanes a, Lanes b, Lanes c, Lanes d) {
  if constexpr (kLanes == 4) {
    const Four ab = pick<0, 4, 1, 5>(a, b) + pick<2, 6, 3, 7>(a, b);
    const Four cd = pick<0, 4, 1, 5>(c, d) + pick<2, 6, 3, 7>(c, d);
    return pick<0, 1, 4, 5>(ab, cd) + pick<2, 3, 6, 7>(ab, cd);
  } else {
    return sums_of_four<kLanes / 2>(add_halves<kLanes>(a), add_halves<kLanes>(b), add_halves<kLanes>(c),
                                    add_halves<kLanes>(d));
  }
}

// scores[row, key] of four keys, `acc` being the products of each row and key, whose lanes are added in that order.
template <int kRows>
static inline void store_sums(const Floats (*acc)[4], float* scores) {
#if defined(__AVX512F__)
  if constexpr (kRows == 4) {  // all at once takes half of the instructions
    Floats rows[4];
    for (int r = 0; r < 4; r++) {
      const __m512 a = (__m512)acc[r][0], b = (__m512)acc[r][1], c = (__m512)acc[r][2], d = (__m512)acc[r][3];
      const Floats ab = (Floats)_mm512_shuffle_f32x4(a, b, 0x44) + (Floats)_mm512_shuffle_f32x4(a, b, 0xee);
      const Floats cd = (Floats)_mm512_shuffle_f32x4(c, d, 0x44) + (Floats)_mm512_shuffle_f32x4(c, d, 0xee);
      rows[r] = (Floats)_mm512_shuffle_f32x4((__m512)ab, (__m512)cd, 0x88) +
                (Floats)_mm512_shuffle_f32x4((__m512)ab, (__m512)cd, 0xdd);  // four lanes of each key
    }
    __m512 pairs[2];
    for (int i = 0; i < 2; i++) {
      const __m512 even = (__m512)rows[2 * i], odd = (__m512)rows[2 * i + 1];
      pairs[i] = (__m512)((Floats)_mm512_shuffle_ps(even, odd, 0x44) + (Floats)_mm512_shuffle_ps(even, odd, 0xee));
    }
    const __m512 by_key = (__m512)((Floats)_mm512_shuffle_ps(pairs[0], pairs[1], 0x88) +
                                   (Floats)_mm512_shuffle_ps(pairs[0], pairs[1], 0xdd));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const Floats by_row = (Floats)_mm512_permutexvar_ps(order, by_key);
    for (int r = 0; r < 4; r++)
      std::memcpy(scores + r * kKeys, reinterpret_cast<const float*>(&by_row) + 4 * r, 4 * sizeof(float));
    return;
  }
#endif
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
    const Four sums = sums_of_four<kWidth>(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    std::memcpy(scores + r * kKeys, &sums, sizeof sums);
  }
}

// Keys, or values, that narrow tiles read one after the other, and what is brought in meanwhile.
template <class T>
struct Stretch {
  const T* at;
  int64_t first, count;
  Upcoming next;
};

// weights[row to row + kRows, keys]: dot products with the keys before `end`, four at a time.
template <int kRows, class T>
static void narrow_scores(const Attention& a, const Running& run, Stretch<T>& of, int64_t end, int64_t row) {
  const int64_t depth = a.head_dim, count = std::min(of.count, end - of.first);
  const T* const keys = of.at;
  const float* const q = run.q + row * depth;
  float* const scores = run.weights + row * kKeys + of.first;
  const auto add_rest = [&](int64_t i, int r, int64_t d) {  // of dimensions that fill no vector
    float total = scores[r * kKeys + i];
    for (; d < depth; d++) total = __builtin_fmaf(q[r * depth + d], value(keys + i * depth + d), total);
    scores[r * kKeys + i] = total;
  };
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    of.next.bring(4 * depth * sizeof(T));
    Floats acc[kRows][4];
    for (int r = 0; r < kRows; r++)
      for (int c = 0; c < 4; c++) acc[r][c] = Floats{};
    int64_t d = 0;
    for (; d + kWidth <= depth; d += kWidth) {
      Floats part[4];
      for (int c = 0; c < 4; c++) part[c] = load(keys + (i + c) * depth + d);
      for (int r = 0; r < kRows; r++) {
        const Floats x = load(q + r * depth + d);
        for (int c = 0; c < 4; c++) acc[r][c] += x * part[c];
      }
    }
    store_sums<kRows>(acc, scores + i);
    for (int r = 0; d < depth && r < kRows; r++)
      for (int c = 0; c < 4; c++) add_rest(i + c, r, d);
  }
  for (; i < count; i++)
    for (int r = 0; r < kRows; r++) {
      Floats total{};
      int64_t d = 0;
      for (; d + kWidth <= depth; d += kWidth) total += load(q + r * depth + d) * load(keys + i * depth + d);
      scores[r * kKeys + i] = sum(total);
      add_rest(i, r, d);
    }
}

// As `softmax`, with keys along the vectors; the sums are not rescaled yet.
static void narrow_softmax(const Attention& a, const Running& run, int64_t base, int64_t first, int64_t end) {
  Ints lane;
  for (int i = 0; i < kWidth; i++) lane[i] = i;
  float before[kTileRows], totals[kTileRows] = {};
  std::memcpy(before, run.top, run.filled * sizeof(float));
  for (int64_t row = 0; row < run.rows; row++) {
    float* const weights = run.weights + row * kKeys;
    Floats top = broadcast(before[row]), total{};
    const int64_t position = run.position[row];
    const bool as_they_are = a.soft_cap == 0 && a.causal && !a.window && end % kWidth == 0 && base + end - 1 <= position;
    for (int64_t i = 0; as_they_are && i < end; i += kWidth) top = max(top, load(weights + i));
    for (int64_t i = first - first % kWidth; !as_they_are && i < end; i += kWidth) {
      const Ints at = lane + (int32_t)i, age = (int32_t)(position - base) - at;
      const Ints seen = (at >= (int32_t)first) & (at < (int32_t)end) & seen_at(a, age);
      const Floats scores = seen ? capped(a, load(weights + i)) : broadcast(-__builtin_inff());
      store(weights + i, scores);
      top = max(top, scores);
    }
    run.top[row] = largest(top);
    for (int64_t i = first - first % kWidth; i < end; i += kWidth) {
      const Floats w = exp(load(weights + i) - run.top[row]);
      store(weights + i, w);
      total += w;
    }
    totals[row] = sum(total);
  }
  for (int64_t v = 0; v < run.filled; v += kWidth) {
    const Floats rescale = exp(load(before + v) - load(run.top + v));
    store(run.rescale + v, rescale);
    store(run.total + v, load(run.total + v) * rescale + load(totals + v));
  }
}

// sums[row to row + kRows, d to d + kVectors * kWidth] = rescaled + weights @ values, for values before `end`.
template <int kRows, int kVectors, class T>
static void narrow_sums(const Attention& a, const Running& run, Stretch<T>* of, int64_t num_stretches, int64_t end,
                        int64_t row, int64_t d) {
  float* const sums = run.sums + row * a.head_dim + d;
  Floats acc[kRows][kVectors];
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kVectors; v++) acc[r][v] = load(sums + r * a.head_dim + v * kWidth) * run.rescale[row + r];
  for (Stretch<T>* each = of; each < of + num_stretches; each++) {
    const float* const weights = run.weights + row * kKeys + each->first;
    const int64_t count = std::min(each->count, end - each->first);
    for (int64_t i = 0; i < count; i++) {
      each->next.bring(a.head_dim * sizeof(T));
      Floats part[kVectors];
      for (int v = 0; v < kVectors; v++) part[v] = load(each->at + i * a.head_dim + d + v * kWidth);
      for (int r = 0; r < kRows; r++) {
        const Floats factor = broadcast(weights[r * kKeys + i]);
        for (int v = 0; v < kVectors; v++) acc[r][v] += factor * part[v];
      }
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kVectors; v++) store(sums + r * a.head_dim + v * kWidth, acc[r][v]);
}

template <int kRows, class T>
static void add_narrow_values(const Attention& a, const Running& run, Stretch<T>* of, int64_t num_stretches, int64_t end,
                              int64_t row) {
  int64_t d = 0;
  for (; d + 4 * kWidth <= a.head_dim; d += 4 * kWidth) narrow_sums<kRows, 4>(a, run, of, num_stretches, end, row, d);
  for (; d + kWidth <= a.head_dim; d += kWidth) narrow_sums<kRows, 1>(a, run, of, num_stretches, end, row, d);
  for (; d < a.head_dim; d++)
    for (int64_t r = row; r < row + kRows; r++) {
      // Each product is rounded with its sum, whatever the compiler makes of the loops around: as in the vectors.
      float total = run.sums[r * a.head_dim + d] * run.rescale[r];
      for (const Stretch<T>* each = of; each < of + num_stretches; each++)
        for (int64_t i = 0; i < std::min(each->count, end - each->first); i++)
          total = __builtin_fmaf(run.weights[r * kKeys + each->first + i], value(each->at + i * a.head_dim + d), total);
      run.sums[r * a.head_dim + d] = total;
    }
}

// Calls `act(Count, row, end)` for all rows, as many at once as are best; what they see ends before key `end` of a group.
template <class Act>
static void for_rows(const Attention& a, const Running& run, int64_t base, int64_t end, const Act& act) {
  const auto call = [&](auto rows, int64_t row) {
    const int64_t last = run.position[row + decltype(rows)::value - 1];
    act(rows, row, a.causal ? std::min(end, last + 1 - base) : end);
  };
  int64_t row = 0;
  for (; row + kRowsAtOnce <= run.rows; row += kRowsAtOnce) call(Count<kRowsAtOnce>(), row);
  for (; row + 2 <= run.rows; row += 2) call(Count<2>(), row);
  for (; row < run.rows; row++) call(Count<1>(), row);
}

// The keys of a group, or its values, from where they lie.
template <class T>
static void stretches_of(const Attention& a, const Group<T>& group, int64_t is_value, Upcoming last,
                         Stretch<T>* stretches) {
  for (int64_t i = 0; i < group.num_pieces; i++) {
    const Piece<T>& piece = group.pieces[i];
    stretches[i] = {is_value ? piece.values : piece.keys, piece.first, piece.count, last};
    const char* const at = reinterpret_cast<const char*>(stretches[i].at);
    if (i) stretches[i - 1].next = {at, at + piece.count * a.head_dim * static_cast<int64_t>(sizeof(T))};
  }
}

// Likewise, widened, as one.
template <class T>
static Stretch<float> widened_stretch(const Attention& a, const Running& run, const Group<T>& group, int64_t is_value) {
  for (int64_t i = 0; i < group.num_pieces; i++) {
    const Piece<T>& piece = group.pieces[i];
    float* const to = run.keys + (piece.first - group.first) * a.head_dim;
    widen(is_value ? piece.values : piece.keys, to, piece.count * a.head_dim);
  }
  return {run.keys, group.first, group.end - group.first, {nullptr, nullptr}};
}

// Keys and values of a group, and meanwhile those that come next are brought in. Where many rows read them they are widened
// first, once.
template <class T>
static void attend_narrow(const Attention& a, const AttentionTile& tile, const AttentionTile* next, const Running& run,
                          const Group<T>& group) {
  const auto over = [&](int64_t is_value, const auto& act) {
    if constexpr (!std::is_same_v<T, float>)
      if (run.rows > kFewRows) {
        Stretch<float> all = widened_stretch(a, run, group, is_value);
        return act(&all, 1);
      }
    Stretch<T> stretches[kKeys];
    stretches_of(a, group, is_value, after<T>(a, tile, next, run, group.base + group.end, is_value), stretches);
    act(stretches, group.num_pieces);
    for (int64_t i = 0; i < group.num_pieces; i++) stretches[i].next.bring_all();
  };
  over(0, [&](auto* stretches, int64_t count) {
    for (int64_t i = 0; i < count; i++)
      for_rows(a, run, group.base, group.end, [&](auto rows, int64_t row, int64_t end) {
        narrow_scores<decltype(rows)::value>(a, run, stretches[i], end, row);
      });
  });
  narrow_softmax(a, run, group.base, group.first, group.end);
  over(1, [&](auto* stretches, int64_t count) {
    for_rows(a, run, group.base, group.end, [&](auto rows, int64_t row, int64_t end) {
      add_narrow_values<decltype(rows)::value>(a, run, stretches, count, end, row);
    });
  });
}

}  // namespace jaxllm::JAXLLM_ISA
