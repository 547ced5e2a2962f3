/* The interface between Python and C. Python checks all sizes before a call (library.py, batch.py). */
#ifndef QUIRE_H
#define QUIRE_H

#include <stddef.h>
#include <stdint.h>

#define QUIRE_ABI 8
#define QUIRE_API __attribute__((visibility("default")))

/* T tokens of a step, S sequences, L rows that need logits, V vocabulary, E hidden size, F size of an MLP,
   H heads, K kv heads, D head size, G groups of 32 along the inputs of a matrix. H, K, D and F may differ by layer. */

enum { GROUP = 32, PANEL = 8 }; /* inputs that share a scale; rows of a matrix computed together */
enum { STEP = 4, STEPS = GROUP / STEP }; /* inputs of a dot-product instruction; their number in a group */

enum quire_kind { QUIRE_Q4 = 0, QUIRE_Q8 = 1, QUIRE_F4 = 2, QUIRE_S4 = 3, NUM_KINDS = 4 };

/* A matrix [rows, cols] in panels of 8 rows. Rows and cols are padded with zeros to whole panels and groups. A panel
   consists of its groups in order. Each group contains, for 8 rows:
     Q4: 128 bytes of nibbles, 8 scales, 8 minima (fp16): weight = scale * nibble + minimum. 160 bytes.
     Q8: 256 bytes of int8, 8 scales (fp16): weight = scale * byte. 272 bytes.
     F4: 128 bytes of nibbles, 8 scales (fp16): weight = scale * value of the nibble, a 4-bit float. 144 bytes.
     S4: the same with signed nibbles, from -8 to 7. 144 bytes.
   Bytes are in the order that dot-product instructions need: [step of 4 inputs][row][input of the step]. A byte of
   nibbles holds step s in its low nibble and step s + 4 in its high nibble, so 4 steps of bytes are 8 steps of inputs. */
typedef struct {
    const uint8_t *data;
    int32_t kind;
    int32_t rows, cols; /* without padding */
} quire_matrix;

typedef struct { /* up to four matrices with the same input; their outputs are concatenated */
    quire_matrix parts[4];
    int32_t num_parts;
    const float *bias; /* for all outputs, or NULL */
} quire_linear;

typedef struct { /* an MLP that some rows choose */
    quire_linear gate_up, down;
} quire_expert;

enum quire_mixer { QUIRE_ATTENTION = 0, QUIRE_DELTA_NET = 1, QUIRE_SHORT_CONV = 2 };
enum quire_activation { QUIRE_SILU = 0, QUIRE_GELU = 1, QUIRE_SIGMOID = 2, QUIRE_CLAMPED_SWIGLU = 3 };

/* A causal convolution of C channels, and for a delta net the heads that follow it: queries, keys, values. The state of a
   sequence is in a slot; slot 0 holds zeros. */
typedef struct {
    const float *weight, *bias;     /* [taps, C], the last tap for the row itself; [C] or NULL */
    const float *decays, *dt_bias;  /* [value heads]: -exp(a_log) */
    const float *norm;              /* [value size]: of the outputs */
    float *rows;                    /* [slots][taps - 1][C]: inputs of the convolution, oldest first */
    float *matrices;                /* [slots][value heads][key size][value size] */
    int32_t num_taps, num_channels;
    int32_t num_key_heads, num_value_heads, key_size, value_size;
    int32_t is_tiled; /* the key head of value head h is h % key heads, else consecutive value heads share one */
} quire_recurrence;

typedef struct { /* x + residual_scale * mixer(norm(x)), then the same with the MLP */
    int32_t mixer;
    quire_linear qkv, o; /* of attention: queries, keys, values and gates. Of a delta net: queries, keys and values; z; b;
                            a. Of a short convolution: b, c, x. And the product after the mixer */
    quire_recurrence recurrence; /* unused by attention */
    quire_linear gate_up, down;                       /* unused if the layer has experts */
    const quire_expert *experts;                      /* [N], all of the same size, or NULL */
    const float *router, *router_bias;                /* [N, E]; [N] or NULL */
    const float *choice_bias, *expert_scales;         /* [N] or NULL: added to the scores for the choice; factors of the
                                                         weights */
    quire_expert shared;                              /* beside the experts, times sigmoid(shared gate); unused without */
    const float *shared_gate;                         /* [E], or NULL: no shared expert */
    const float *input_norm, *mlp_norm;               /* [E] or NULL: of the inputs of attention and MLP */
    const float *post_attention_norm, *post_mlp_norm; /* [E] or NULL: of their outputs */
    const float *v_norm, *sinks;  /* [D] or NULL; [H] or NULL: one more logit of each head, whose value is 0 */
    const float *q_norm, *k_norm; /* [D], one for all heads; or [H, D] and [K, D], of all heads together; or NULL */
    const float *cosines, *sines; /* [max context, rotary size / 2] */
    const float *query_scales;    /* [max context]: factors of the queries by position, or NULL */
    uint16_t *pool;               /* the KV pool: [blocks][K][...] fp16; keys of a head [D][key stride], values
                                     [block size][D] */
    int32_t has_window_blocks;    /* the pool's blocks are numbered by `window_tables`, not by `tables` */
    int32_t num_heads, num_kv_heads, head_size;
    int32_t rotary_size;       /* leading dimensions of a head that are rotated; 0: none */
    int32_t window;            /* tokens that a token sees, including itself; 0: all before it */
    int32_t is_key_value;      /* values are the keys before their norm and rotation: `qkv` has no values */
    int32_t is_shared;         /* keys and values are those of another layer, in whose pool they are: `qkv` has none */
    int32_t has_gate;          /* the output is multiplied by sigmoid(gate) */
    int32_t is_norm_of_width;  /* q_norm and k_norm are of all heads together */
    int32_t is_half_attention; /* whether attention may multiply in fp16 if that is faster on this machine */
    int32_t activation;        /* of the MLP's gate */
    int32_t num_experts, num_chosen; /* N, and experts per row; 0: none */
    int32_t has_sigmoid;             /* scores are sigmoids of the router's logits, not their softmax */
    int32_t renormalizes;            /* the weights of the chosen experts are divided by their sum */
    float experts_scale;             /* of the weighted sum of the experts */
    float attention_scale, attention_softcap; /* softcap 0: none */
    float residual_scale;
    float output_scale; /* of the layer's output, with the residual */
    /* Experts beside the MLP: post_dense_norm(mlp(x)) + post_experts_norm(experts(experts_norm(x))). The router reads
       router_norm(x). NULL: experts are in place of the MLP, and the router reads their input. */
    const float *post_dense_norm, *post_experts_norm, *experts_norm, *router_norm; /* [E] */
    /* A third part: x + norm(proj(activation(gate(x)) * e)), where e [P] is the layer's own embedding of the token. */
    quire_linear ple_gate, ple_proj;
    const float *ple_norm; /* [E], or NULL: there is none */
} quire_layer;

typedef struct {
    int32_t num_layers, hidden_size, vocab_size;
    float norm_eps, embedding_scale, logit_scale, logit_softcap;
    const quire_layer *layers;
    const float *norm;
    quire_linear embedding; /* one part, used as a lookup table */
    quire_linear head;
    /* Embeddings e of all layers: (norm(proj(x) * proj scale) + embedding * scale) / sqrt(2), [layers, P] */
    quire_linear ple_embedding, ple_proj;
    const float *ple_norm; /* [P] */
    int32_t ple_size;      /* P; 0: there are none */
    float ple_scale, ple_proj_scale;
    /* share of an input's steps that get a second 8 bits, in 1/256: 0 is fastest, 256 is all of them,
       of all inputs or of none */
    struct { int32_t qkv, o, gate_up, down, head; } refine;
    int32_t block_size;
} quire_model;

typedef struct { /* rows of a sequence, from the state of one slot to the state of another, which may be the same */
    int32_t first_row, last_row, source, target;
} quire_segment;

typedef struct {
    int32_t num_tokens, num_seqs, num_logits, table_stride;
    const int32_t *tokens;     /* [T] */
    const int32_t *positions;  /* [T] */
    const int32_t *first_rows; /* [S + 1]: first row of each sequence */
    const int32_t *tables;     /* [S, table stride]: block numbers */
    const int32_t *window_tables; /* [S, table stride]: the same for layers with window blocks. Blocks wholly behind the
                                     window of a sequence's first row are not read. NULL: no layer has any */
    const int32_t *kv_starts;  /* [S]: positions before this are in their blocks already and are not written there, except
                                  in window blocks; or NULL */
    const quire_segment *segments;  /* in order; NULL: no layer has a state */
    const int32_t *first_segments;  /* [S + 1]: first segment of each sequence */
    const int32_t *logit_rows; /* [L]: rows of the batch */
    float *logits;             /* [L, V] */
    float *hidden;             /* [T, E]: the last hidden states, or NULL */
    uint8_t *is_sound;         /* [S]: whether the last hidden state of the sequence is finite */
} quire_batch;

typedef struct quire_engine quire_engine; /* threads and working memory */

QUIRE_API int quire_abi(void);
/* quire_forward, quire_logits and quire_project return 0, or -1 if memory ran out; then at most the blocks of this step
   were changed. */
QUIRE_API quire_engine *quire_open(int num_threads);
QUIRE_API void quire_close(quire_engine *engine);
QUIRE_API int quire_use_threads(quire_engine *engine, int num_threads); /* -1: out of memory, nothing was changed */
QUIRE_API int quire_num_threads(const quire_engine *engine); /* threads that were started, including the caller's */
QUIRE_API const char *quire_kernels(void); /* the variant in use: "neon dotprod" */
QUIRE_API int quire_choose_kernels(const char *name); /* 0: chosen; -1: this machine cannot run it. For tests */
QUIRE_API const char *quire_list_kernels(void);       /* variants this machine can run, best first, comma-separated */
QUIRE_API int quire_forward(quire_engine *engine, const quire_model *model, const quire_batch *batch);
/* Computes logits [rows, V] of hidden states returned by a forward pass. */
QUIRE_API int quire_logits(
    quire_engine *engine, const quire_model *model, const float *hidden, int num_rows, float *logits);
QUIRE_API int quire_project(
    quire_engine *engine, const quire_linear *linear, const float *x, int num_rows, int refine, float *y);
/* In the layers with or without window blocks. `pairs` [n, 2]: source, destination */
QUIRE_API void quire_copy_blocks(const quire_model *model, int has_window_blocks, const int32_t *pairs, int num_pairs);
/* Sets values that are not finite to 0. */
QUIRE_API void quire_purge_blocks(const quire_model *model, int has_window_blocks, const int32_t *blocks, int num_blocks);
QUIRE_API size_t quire_block_bytes(int num_kv_heads, int head_size, int block_size); /* in one layer */

/* Packs the bytes of a file. `out` has quire_packed_bytes(kind, rows, cols) bytes. */
QUIRE_API size_t quire_packed_bytes(int kind, int rows, int cols);
enum quire_source {
    SOURCE_Q4_0, SOURCE_Q4_1, SOURCE_Q4_K, SOURCE_Q8_0, SOURCE_F32, SOURCE_F16, SOURCE_BF16,
    SOURCE_Q5_0, SOURCE_Q5_1, SOURCE_Q2_K, SOURCE_Q3_K, SOURCE_Q5_K, SOURCE_Q6_K,
    SOURCE_IQ4_NL, SOURCE_IQ4_XS, SOURCE_MXFP4, SOURCE_TQ1_0, SOURCE_TQ2_0,
};
QUIRE_API int quire_source_kind(int source); /* the kind that a source is packed to */
QUIRE_API void quire_pack(int source, const uint8_t *data, int rows, int cols, uint8_t *out);
QUIRE_API void quire_unpack(const quire_matrix *matrix, int row, float *out); /* one row as floats, [cols] */

#endif
