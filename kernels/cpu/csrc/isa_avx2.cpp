#define PTQ_ISA kAvx2
#define PTQ_ISA_AVX2 1
#define PTQ_TABLE kKernelsAvx2
#include "isa.inc"
