// Included before every file of llama.cpp's build on x86_64. GCC's `_tile_loadconfig` (seen in 12.2) tells the compiler
// that it reads 8 bytes where it reads 64: the tile sizes are then written too late and the first AMX instruction traps.
#if defined(__AMX_TILE__)
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg\t%0" ::"m"(*(const char(*)[64])(config)) : "memory")
#endif
