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
    const float *logits;          /* [S, V], after penalties, bias and what is forbidden */
    const quire_choice *choices;  /* [S] */
    int32_t *tokens;              /* [S]: out, always in [0, V) */
    uint8_t *is_sound;            /* [S]: out, whether no logit is NaN and the largest is finite */
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

typedef struct { /* tokens that a grammar does not allow */
    int32_t num_rows, vocab_size, mask_bytes; /* N, V, at least V / 8 rounded up */
    float *logits;                            /* [any, V]: minus infinity where the bit of a token is not set */
    const int32_t *rows;                      /* [N]: which of them, none twice */
    const uint8_t *masks;                     /* [N, mask_bytes]: a bit a token, lowest first */
    uint8_t *is_sound;                        /* [N]: out, as in quire_sampling, of the logits as they came */
} quire_forbidding;

/* 0: ran; -1: no memory for it */
QUIRE_API int quire_sample(quire_engine *engine, const quire_sampling *args);
QUIRE_API int quire_rank(quire_engine *engine, const quire_ranking *args);
QUIRE_API void quire_forbid(quire_engine *engine, const quire_forbidding *args);

#endif
