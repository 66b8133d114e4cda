// Tensors of files into arrays of another order and dtype: read, cast and placed by many threads in one call, which
// holds no lock of Python's.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "gguf_blocks.h"

namespace jaxllm {
namespace {

constexpr int kMostAxes = 8;
constexpr int64_t kChunkBytes = 256 << 10;  // of a file that a thread reads at once; it stays in the L2 cache
constexpr int64_t kChunkRows = 32;          // at least, so that a transposed row of the target is written in whole lines
constexpr int64_t kLongRow = 64 << 10;      // bytes of a row from which one is enough
constexpr int64_t kMostRow = 1 << 20;       // bytes of a row from which those of the next axis are taken instead

enum Kind : int32_t { kFloat32, kFloat16, kBfloat16, kBlocks };  // from the last on, of `kBlockTypes`
enum Status : int32_t { kOk, kNotFinite, kTooShort, kCannotRead };

}  // namespace

// As in checkpoint/native_read.py.
struct Job {
  char* target;
  int64_t offset;              // bytes, in the file, of the first piece
  int64_t sizes[kMostAxes];    // of the tensor's axes, in the order of the file
  int64_t strides[kMostAxes];  // of each in the target, in elements
  int64_t piece_bytes;         // the tensor's bytes lie in pieces, which follow each other
  int64_t counts[kMostAxes];   // so many of them,
  int64_t steps[kMostAxes];    // so many bytes from each to the next: the outermost first
  int32_t file, source_kind, target_kind, num_axes, num_steps;
  float shift;            // added to each value
  int32_t status, error;  // set by the call
};

namespace {

int64_t num_bytes(int32_t kind, int64_t values) {
  if (kind < kBlocks) return values * (kind == kFloat32 ? 4 : 2);
  const BlockType& type = kBlockTypes[kind - kBlocks];
  return values / type.values * type.bytes;
}

uint32_t widen(uint32_t bits, Kind kind) {  // to the bits of a float32
  if (kind == kBfloat16) return bits << 16;
  const float value = half_to_float(static_cast<uint16_t>(bits));
  uint32_t out;
  std::memcpy(&out, &value, 4);
  return out;
}

uint16_t narrow(uint32_t bits) {  // to bfloat16, to the nearest, ties to even
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

template <Kind from, Kind to>
struct Cast {
  using Source = std::conditional_t<from == kFloat32, uint32_t, uint16_t>;
  using Target = std::conditional_t<to == kFloat32, uint32_t, uint16_t>;
  static constexpr Target exponent = to == kFloat32 ? 0x7f800000u : to == kBfloat16 ? 0x7f80u : 0x7c00u;

  static Target of(Source bits) {
    if constexpr (from == to) return bits;
    const uint32_t wide = from == kFloat32 ? bits : widen(bits, from);
    if constexpr (to == kFloat32) return wide;
    return narrow(wide);
  }

  // Writes `n` values, `step` apart in both. Returns whether all are finite in the target's kind.
  static bool row(const Source* source, int64_t source_step, Target* target, int64_t target_step, int64_t n) {
    bool bad = false;
    if (source_step == 1 && target_step == 1) {
      for (int64_t i = 0; i < n; i++) {
        target[i] = of(source[i]);
        bad |= (target[i] & exponent) == exponent;
      }
    } else {
      for (int64_t i = 0; i < n; i++) {
        const Target value = of(source[i * source_step]);
        target[i * target_step] = value;
        bad |= (value & exponent) == exponent;
      }
    }
    return !bad;
  }
};

// Rows of the axis `axis` at one index of those before it.
struct Chunk {
  Job* job;
  int axis;
  int64_t target, start;  // of its first value: in elements of the target, and in bytes of the tensor
  int64_t rows, row_values, row_bytes;
};

// Places a chunk whose values lie at `source`.
template <typename C>
bool place(const Chunk& chunk, const char* source) {
  using Source = typename C::Source;
  using Target = typename C::Target;
  const Job& job = *chunk.job;
  int64_t steps[kMostAxes], sizes[kMostAxes], step = 1;
  for (int i = job.num_axes - 1; i >= chunk.axis; i--) {
    sizes[i] = i == chunk.axis ? chunk.rows : job.sizes[i];
    steps[i] = step;
    step *= sizes[i];
  }
  // The innermost loop runs along the axis whose values lie closest in the target.
  int inner = job.num_axes - 1;
  for (int i = chunk.axis; i < job.num_axes; i++)
    if (sizes[i] > 1 && (sizes[inner] == 1 || job.strides[i] < job.strides[inner])) inner = i;
  Target* const target = reinterpret_cast<Target*>(job.target) + chunk.target;
  const Source* const begin = reinterpret_cast<const Source*>(source);
  int64_t index[kMostAxes] = {};
  bool finite = true;
  for (;;) {
    int64_t from = 0, to = 0;
    for (int i = chunk.axis; i < job.num_axes; i++) from += index[i] * steps[i], to += index[i] * job.strides[i];
    finite &= C::row(begin + from, steps[inner], target + to, job.strides[inner], sizes[inner]);
    int axis = job.num_axes - 1;
    for (; axis >= chunk.axis; axis--) {
      if (axis == inner) continue;
      if (++index[axis] < sizes[axis]) break;
      index[axis] = 0;
    }
    if (axis < chunk.axis) return finite;
  }
}

bool place_any(const Chunk& chunk, int32_t kind, const char* source) {
  switch (kind * 4 + chunk.job->target_kind) {
    case kFloat32 * 4 + kFloat32: return place<Cast<kFloat32, kFloat32>>(chunk, source);
    case kFloat32 * 4 + kBfloat16: return place<Cast<kFloat32, kBfloat16>>(chunk, source);
    case kFloat16 * 4 + kFloat32: return place<Cast<kFloat16, kFloat32>>(chunk, source);
    case kFloat16 * 4 + kFloat16: return place<Cast<kFloat16, kFloat16>>(chunk, source);
    case kFloat16 * 4 + kBfloat16: return place<Cast<kFloat16, kBfloat16>>(chunk, source);
    case kBfloat16 * 4 + kFloat32: return place<Cast<kBfloat16, kFloat32>>(chunk, source);
    default: return place<Cast<kBfloat16, kBfloat16>>(chunk, source);
  }
}

// The float32 values of a chunk's bytes, with the job's shift.
void to_floats(const Job& job, const char* source, int64_t values, float* out) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(source);
  if (job.source_kind >= kBlocks) {
    const BlockType& type = kBlockTypes[job.source_kind - kBlocks];
    for (int64_t i = 0; i < values; i += type.values, bytes += type.bytes) type.dequantize(bytes, out + i);
  } else {
    for (int64_t i = 0; i < values; i++) {
      uint32_t bits;
      if (job.source_kind == kFloat32) {
        std::memcpy(&bits, bytes + 4 * i, 4);
      } else {
        uint16_t narrow_bits;
        std::memcpy(&narrow_bits, bytes + 2 * i, 2);
        bits = widen(narrow_bits, static_cast<Kind>(job.source_kind));
      }
      std::memcpy(out + i, &bits, 4);
    }
  }
  if (job.shift != 0)
    for (int64_t i = 0; i < values; i++) out[i] += job.shift;
}

Status read_all(int file, char* into, int64_t bytes, int64_t offset, int32_t* error) {
  while (bytes > 0) {
    const ssize_t n = pread(file, into, bytes, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      *error = errno;
      return kCannotRead;
    }
    if (n == 0) return kTooShort;
    into += n, bytes -= n, offset += n;
  }
  return kOk;
}

// Some bytes of a tensor, from `start` on, of all its pieces.
Status read_pieces(const Job& job, char* into, int64_t start, int64_t bytes, int32_t* error) {
  while (bytes > 0) {
    int64_t piece = start / job.piece_bytes, offset = job.offset + start % job.piece_bytes;
    const int64_t n = std::min(bytes, job.piece_bytes - start % job.piece_bytes);
    for (int i = job.num_steps - 1; i >= 0; i--) {
      offset += piece % job.counts[i] * job.steps[i];
      piece /= job.counts[i];
    }
    if (const Status status = read_all(job.file, into, n, offset, error); status != kOk) return status;
    into += n, start += n, bytes -= n;
  }
  return kOk;
}

void append_chunks(Job* job, std::vector<Chunk>* chunks) {
  int axis = 0;
  int64_t lead = 1, row_values = 1;
  for (int i = 1; i < job->num_axes; i++) row_values *= job->sizes[i];
  const int64_t unit = job->source_kind < kBlocks ? 1 : kBlockTypes[job->source_kind - kBlocks].values;
  while (axis + 1 < job->num_axes && num_bytes(job->source_kind, row_values) > kMostRow &&
         row_values / job->sizes[axis + 1] % unit == 0) {
    lead *= job->sizes[axis++];
    row_values /= job->sizes[axis];
  }
  const int64_t row_bytes = num_bytes(job->source_kind, row_values), size = job->sizes[axis];
  const int64_t step = std::max(row_bytes < kLongRow ? kChunkRows : 1, kChunkBytes / row_bytes);
  for (int64_t at = 0; at < lead; at++) {
    int64_t target = 0, rest = at;
    for (int i = axis - 1; i >= 0; i--) {
      target += rest % job->sizes[i] * job->strides[i];
      rest /= job->sizes[i];
    }
    for (int64_t first = 0; first < size; first += step) {
      const int64_t rows = std::min(step, size - first);
      const int64_t start = (at * size + first) * row_bytes;
      chunks->push_back({job, axis, target + first * job->strides[axis], start, rows, row_values, row_bytes});
    }
  }
}

}  // namespace
}  // namespace jaxllm

// Reads each job's tensor into its target, with `num_threads` threads, and sets its status.
extern "C" void jaxllm_read_tensors(jaxllm::Job* jobs, int64_t num_jobs, int32_t num_threads) {
  using namespace jaxllm;
  std::vector<Chunk> chunks;
  for (Job* job = jobs; job < jobs + num_jobs; job++) append_chunks(job, &chunks);
  int64_t most_bytes = 0, most_values = 0;
  for (const Chunk& chunk : chunks) {
    most_bytes = std::max(most_bytes, chunk.rows * chunk.row_bytes);
    if (chunk.job->source_kind >= kBlocks || chunk.job->shift != 0)
      most_values = std::max(most_values, chunk.rows * chunk.row_values);
  }
  std::vector<std::atomic<int32_t>> statuses(num_jobs);
  std::atomic<size_t> next{0};
  const auto work = [&] {
    std::vector<char> memory(most_bytes);
    std::vector<float> floats(most_values);
    for (size_t i; (i = next.fetch_add(1)) < chunks.size();) {
      const Chunk& chunk = chunks[i];
      Job* const job = chunk.job;
      int32_t error = 0;
      Status status = read_pieces(*job, memory.data(), chunk.start, chunk.rows * chunk.row_bytes, &error);
      const char* source = memory.data();
      int32_t kind = job->source_kind;
      if (status == kOk && (kind >= kBlocks || job->shift != 0)) {
        to_floats(*job, source, chunk.rows * chunk.row_values, floats.data());
        source = reinterpret_cast<const char*>(floats.data()), kind = kFloat32;
      }
      if (status == kOk && !place_any(chunk, kind, source)) status = kNotFinite;
      int32_t expected = kOk;
      if (status != kOk && statuses[job - jobs].compare_exchange_strong(expected, status)) job->error = error;
    }
  };
  std::vector<std::thread> threads;
  for (int32_t i = 1; i < num_threads; i++) threads.emplace_back(work);
  work();
  for (auto& thread : threads) thread.join();
  for (int64_t i = 0; i < num_jobs; i++) jobs[i].status = statuses[i];
}
