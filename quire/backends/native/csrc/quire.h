/* What Python hands to C and back. All sizes are checked on the Python side (library.py, batch.py) before a call. */
#ifndef QUIRE_H
#define QUIRE_H

#include <stddef.h>
#include <stdint.h>

#define QUIRE_ABI 4
#define QUIRE_API __attribute__((visibility("default")))

/* T tokens of a step, S sequences, L rows that want logits, V vocabulary, E hidden size, F ffn size,
   H heads, K kv heads, D head size, G groups of 32 along the inputs of a matrix. */

enum { GROUP = 32, PANEL = 8 }; /* inputs that share a scale; rows of a matrix computed together */

enum quire_kind { QUIRE_Q4 = 0, QUIRE_Q8 = 1 };

/* A matrix [rows, cols], cut into panels of 8 rows; rows and cols are padded with zeros to whole panels and groups.
   A panel is its groups one after the other. Of each group, for 8 rows:
     Q4: 128 bytes of nibbles, 8 scales, 8 minima (fp16): weight = scale * nibble + minimum. 160 bytes.
     Q8: 256 bytes of int8, 8 scales (fp16): weight = scale * byte. 272 bytes.
   Bytes lie as dot-product instructions want them: [step of 4 inputs][row][input of the step]. A byte of Q4 holds that
   place of step s in its low nibble and of step s + 4 in its high nibble, so 4 steps of bytes are 8 steps of inputs. */
typedef struct {
    const uint8_t *data;
    int32_t kind;
    int32_t rows, cols; /* as the model has them */
} quire_matrix;

typedef struct { /* up to three matrices that share their input; their outputs lie side by side */
    quire_matrix parts[3];
    int32_t num_parts;
    const float *bias; /* of all outputs, or NULL */
} quire_linear;

typedef struct {
    quire_linear qkv, o, gate_up, down;
    const float *input_norm, *mlp_norm;             /* [E] */
    const float *post_attention_norm, *post_mlp_norm; /* [E] or NULL */
    const float *q_norm, *k_norm;                   /* [D] or NULL */
    const float *cosines, *sines;                   /* [max context, rotary size / 2] */
    int32_t window;                                 /* 0: none */
} quire_layer;

typedef struct {
    int32_t num_layers, hidden_size, ffn_size, num_heads, num_kv_heads, head_size, rotary_size, vocab_size;
    int32_t max_context, activation; /* 0 silu, 1 gelu (tanh) */
    float norm_eps, attention_scale, embedding_scale, attention_softcap, logit_softcap;
    const quire_layer *layers;
    const float *norm;
    quire_linear embedding; /* one part: rows are looked up */
    quire_linear head;
    /* share of the groups of an input that get a second 8 bits, in 1/256: 0 fastest, 256 all of them */
    struct { int32_t qkv, o, gate_up, down, head; } refine;
    /* the KV pool: [layers][blocks][2][K][...] fp16; keys of a head [D][key stride], values [block size][D] */
    uint16_t *pool;
    int32_t num_blocks, block_size;
    int32_t is_half_attention; /* whether attention may multiply in fp16, where the machine is faster at that */
} quire_model;

typedef struct {
    int32_t num_tokens, num_seqs, num_logits, table_stride;
    const int32_t *tokens;     /* [T] */
    const int32_t *positions;  /* [T] */
    const int32_t *first_rows; /* [S + 1]: rows of each sequence */
    const int32_t *tables;     /* [S, table stride]: block numbers */
    const int32_t *logit_rows; /* [L]: rows of the batch */
    float *logits;             /* [L, V] */
    float *hidden;             /* [T, E]: the last hidden states, or NULL */
    uint8_t *is_sound;         /* [S]: whether the last hidden state of each is made of numbers */
} quire_batch;

typedef struct quire_engine quire_engine; /* threads and working memory */

QUIRE_API int quire_abi(void);
/* 0: ran; -1: no memory for it, nothing was changed but the blocks of this step */
QUIRE_API quire_engine *quire_open(int num_threads);
QUIRE_API void quire_close(quire_engine *engine);
QUIRE_API int quire_use_threads(quire_engine *engine, int num_threads); /* -1: no memory, all as it was */
QUIRE_API int quire_num_threads(const quire_engine *engine); /* that were started, the caller's included */
QUIRE_API const char *quire_kernels(void); /* which variant runs: "neon dotprod" */
QUIRE_API int quire_choose_kernels(const char *name); /* 0: it does from now on; -1: this machine cannot. For tests */
QUIRE_API const char *quire_list_kernels(void);       /* all this machine can run, best first, separated by commas */
QUIRE_API int quire_forward(quire_engine *engine, const quire_model *model, const quire_batch *batch);
/* logits [rows, V] of hidden states that a forward pass gave */
QUIRE_API int quire_logits(
    quire_engine *engine, const quire_model *model, const float *hidden, int num_rows, float *logits);
QUIRE_API int quire_project(
    quire_engine *engine, const quire_linear *linear, const float *x, int num_rows, int refine, float *y);
/* [n, 2]: source, destination */
QUIRE_API void quire_copy_blocks(const quire_model *model, const int32_t *pairs, int num_pairs);
/* What is no number becomes 0. */
QUIRE_API void quire_purge_blocks(const quire_model *model, const int32_t *blocks, int num_blocks);
QUIRE_API size_t quire_block_bytes(const quire_model *model); /* of one block in one layer */

/* Packing, from a file's bytes. `out` has quire_packed_bytes(kind, rows, cols). */
QUIRE_API size_t quire_packed_bytes(int kind, int rows, int cols);
enum quire_source { SOURCE_Q4_0, SOURCE_Q4_1, SOURCE_Q4_K, SOURCE_Q8_0, SOURCE_F32, SOURCE_F16, SOURCE_BF16 };
QUIRE_API int quire_source_kind(int source); /* the kind it is packed to */
QUIRE_API void quire_pack(int source, const uint8_t *data, int rows, int cols, uint8_t *out);
QUIRE_API void quire_unpack(const quire_matrix *matrix, int row, float *out); /* one row as numbers, [cols] */

#endif
