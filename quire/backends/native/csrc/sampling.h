/* From logits to tokens. What Python hands over is in quire/backends/native/sampling.py, word for word. */
#ifndef QUIRE_SAMPLING_H
#define QUIRE_SAMPLING_H

#include "quire.h"

typedef struct { /* how the token of one row is chosen */
    double draw;       /* in [0, 1) */
    double top_p;      /* 1: no limit */
    float temperature; /* 0: the largest logit wins */
    float min_p;       /* 0: no limit */
    int32_t top_k;     /* in [1, V); 0: no limit */
} quire_choice;

typedef struct {
    int32_t num_rows, vocab_size; /* S, V */
    float *logits;                /* [S, V], after penalties and bias; minus infinity where a mask forbids a token */
    const uint8_t *const *masks;  /* [S]: what a grammar allows, a bit a token, lowest first; or NULL: anything */
    const quire_choice *choices;  /* [S] */
    int32_t *tokens;              /* [S]: out, always in [0, V) */
    uint8_t *is_sound;            /* [S]: out, whether no logit is NaN and the largest is finite */
    uint8_t *was_sound;           /* [S]: out, the same before the mask */
} quire_sampling;

typedef struct {
    int32_t num_rows, vocab_size, num_top; /* N, V, K in [0, V] */
    const float *logits;                   /* [N, V] */
    const int32_t *chosen;                 /* [N]: a token of each row */
    float *logprobs;                       /* [N]: out, of the chosen */
    int32_t *ranks;                        /* [N]: out, how many tokens are more probable */
    int32_t *top_tokens;                   /* [N, K]: out, the most probable first, equal ones by their ids */
    float *top_logprobs;                   /* [N, K]: out */
} quire_ranking;

/* 0: ran; -1: no memory for it */
QUIRE_API int quire_sample(quire_engine *engine, const quire_sampling *args);
QUIRE_API int quire_rank(quire_engine *engine, const quire_ranking *args);

#endif
