/* From logits to tokens. quire/backends/native/runner.py declares the same structures. */
#ifndef QUIRE_SAMPLING_H
#define QUIRE_SAMPLING_H

#include "quire.h"

typedef struct { /* sampling parameters of one row */
    double draw;       /* in [0, 1) */
    double top_p;      /* 1: no limit */
    float temperature; /* 0: greedy */
    float min_p;       /* 0: no limit */
    int32_t top_k;     /* in [1, V); 0: no limit */
} quire_choice;

typedef struct {
    int32_t num_rows, vocab_size; /* S, V */
    float *logits;                /* [S, V], after penalties and bias; set to -infinity where a mask forbids a token */
    const uint8_t *const *masks;  /* [S]: allowed tokens, one bit each, lowest bit first; NULL: all are allowed */
    const quire_choice *choices;  /* [S] */
    int32_t *tokens;              /* [S]: out, always in [0, V) */
    uint8_t *is_sound;            /* [S]: out, whether no logit is NaN and the largest is finite */
    uint8_t *was_sound;           /* [S]: out, the same before the mask */
} quire_sampling;

typedef struct {
    int32_t num_rows, vocab_size, num_top; /* N, V, K in [0, V] */
    const float *logits;                   /* [N, V] */
    const int32_t *chosen;                 /* [N]: a token of each row */
    float *logprobs;                       /* [N]: out, logprob of the chosen token */
    int32_t *ranks;                        /* [N]: out, how many tokens are more probable */
    int32_t *top_tokens;                   /* [N, K]: out, most probable first, equal ones by id */
    float *top_logprobs;                   /* [N, K]: out */
} quire_ranking;

/* 0: success; -1: out of memory */
QUIRE_API int quire_sample(quire_engine *engine, const quire_sampling *args);
QUIRE_API int quire_rank(quire_engine *engine, const quire_ranking *args);

#endif
