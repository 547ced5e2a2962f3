/* The AVX2 variant with the byte products of AVX-VNNI (Intel desktops and laptops since 2021, AMD since 2024). */
#include "variant_avx2.c"
