// Compiled once per instruction set: JAXLLM_ISA names it, JAXLLM_TABLE its table.
#include "attention.h"
#include "elementwise.h"
#include "gemm.h"
#include "panels.h"
#include "quantized.h"
#include "sampling.h"

namespace jaxllm {

const Kernels JAXLLM_TABLE = {
    JAXLLM_ISA_NAME, JAXLLM_ISA::kHasPairs, false, JAXLLM_ISA::kVectors* JAXLLM_ISA::kWidth, JAXLLM_ISA::kMostRows,
    JAXLLM_ISA::kTileRows, JAXLLM_ISA::round, JAXLLM_ISA::pack, JAXLLM_ISA::gemm, JAXLLM_ISA::quantized_gemm,
    JAXLLM_ISA::round_row, JAXLLM_ISA::panel_gemm,
    JAXLLM_ISA::write_kv, JAXLLM_ISA::attend, JAXLLM_ISA::scratch_floats,
    JAXLLM_ISA::normalize, JAXLLM_ISA::draw, JAXLLM_ISA::best, JAXLLM_ISA::draw_floats, JAXLLM_ISA::best_floats,
    JAXLLM_ISA::rotate, JAXLLM_ISA::gate, JAXLLM_ISA::add, JAXLLM_ISA::rms_norm,
};

}  // namespace jaxllm
