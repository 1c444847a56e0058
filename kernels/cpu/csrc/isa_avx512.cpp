#define PTQ_ISA kAvx512Vnni
#define PTQ_ISA_AVX512 1
#define PTQ_TABLE kKernelsAvx512
#include "isa.inc"
