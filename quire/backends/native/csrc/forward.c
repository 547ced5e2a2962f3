/* One forward pass: a batch of tokens through all layers, and logits for the requested rows. */
#include <math.h>
#include <string.h>

#include "half.h"
#include "pass.h"

enum { PIECE = 256 }; /* tokens of a piece of the context, of which each can be processed by another thread */
enum { MAX_RECORDS = 1 << 24 }; /* floats for the states of pieces: 64 MiB */

static size_t rounded(size_t num_bytes) { return (num_bytes + 63) / 64 * 64; }

static int is_attention(const quire_layer *layer) { return layer->mixer == QUIRE_ATTENTION; }
/* Returns the numbers of a row for the mixer: of attention with room for values that are keys. */
static int qkv_size(const quire_layer *layer) {
    return num_outputs(&layer->qkv) + (layer->is_key_value ? layer->num_kv_heads * layer->head_size : 0);
}
static int has_dense_mlp(const quire_layer *layer) { return !layer->num_experts || layer->experts_norm; }
/* Returns the size of the MLP that all rows use; 0: there is none. */
static int ffn_size(const quire_layer *layer) {
    if (has_dense_mlp(layer)) return layer->down.parts[0].cols;
    return layer->shared_gate ? layer->shared.down.parts[0].cols : 0;
}

/* Matrix products */

typedef struct {
    quire_engine *engine;
    const quire_variant *run;
    const quire_linear *linear;
    const quire_input *input;
    float *y;
    int stride, num_panels, num_units;
} product;

static int first_panel(const product *job, int unit) {
    const int at_once = job->run->at_once;
    return at_once * (int)((int64_t)ceil_div(job->num_panels, at_once) * unit / job->num_units);
}

/* Returns the number of units for `num_pieces` indivisible pieces of work: a few for each thread, if possible of equal
   size, because at the end of a product all threads wait for the last unit. */
static int num_units(int num_pieces, int num_threads) {
    for (int per_thread = UNITS_PER_THREAD; per_thread <= 2 * UNITS_PER_THREAD; per_thread++)
        if (num_pieces % (per_thread * num_threads) == 0) return per_thread * num_threads;
    return smallest(UNITS_PER_THREAD * num_threads, num_pieces);
}

/* Multiplies rows that are followed by their rounding errors, and adds the two products. */
static void multiply_pairs(
    const quire_variant *run, const quire_matrix *part, int panel, const quire_input *input, float *scratch, float *y,
    size_t stride, int count) {
    enum { ROWS = 32, COLUMNS = 2 * PANEL };
    const size_t size = (size_t)panel_bytes(part->kind) * (size_t)input->num_groups;
    float products[2 * ROWS * COLUMNS];
    for (int column = 0; column < count; column += COLUMNS) {
        const uint8_t *w = part->data + (size_t)(panel + column / PANEL) * size;
        const int width = smallest(count - column, COLUMNS);
        for (int first = 0; first < input->num_rows; first += ROWS) {
            const int num_rows = smallest(input->num_rows - first, ROWS);
            quire_input rows = view_rows(input, first, num_rows);
            rows.num_rows = 2 * num_rows;
            run->panels(w, part->kind, &rows, scratch, products, COLUMNS, width);
            for (int row = 0; row < num_rows; row++) {
                const float *from = products + 2 * row * COLUMNS;
                float *to = y + (size_t)(first + row) * stride + column;
                for (int i = 0; i < width; i++) to[i] = from[i] + from[COLUMNS + i];
            }
        }
    }
}

void multiply_range(
    const quire_variant *run, const quire_linear *linear, const quire_input *input, int first, int last, float *scratch,
    float *y, int stride) {
    int part_first = 0, column = 0;
    for (int i = 0; i < linear->num_parts; i++) {
        const quire_matrix *part = &linear->parts[i];
        const int panels = ceil_div(part->rows, PANEL);
        const size_t size = (size_t)panel_bytes(part->kind) * (size_t)input->num_groups;
        const int from = largest(first - part_first, 0), to = smallest(last - part_first, panels);
        if (from < to) {
            const int at = column + from * PANEL, count = smallest(to * PANEL, part->rows) - from * PANEL;
            if (input->num_copies == 2) multiply_pairs(run, part, from, input, scratch, y + at, (size_t)stride, count);
            else run->panels(part->data + (size_t)from * size, part->kind, input, scratch, y + at, (size_t)stride, count);
            for (int row = 0; row < input->num_rows && linear->bias; row++)
                run->add(y + (size_t)row * (size_t)stride + at, linear->bias + at, count);
        }
        part_first += panels;
        column += part->rows;
    }
}

static void multiply_unit(void *context, int unit, int thread) {
    const product *job = context;
    const int first = first_panel(job, unit), last = smallest(first_panel(job, unit + 1), job->num_panels);
    multiply_range(
        job->run, job->linear, job->input, first, last, quire_own_memory(job->engine, thread), job->y, job->stride);
}

static void project_apart(
    quire_engine *engine, const quire_variant *run, const quire_linear *linear, const quire_input *input, float *y,
    int stride) {
    int num_panels = 0;
    for (int i = 0; i < linear->num_parts; i++) num_panels += ceil_div(linear->parts[i].rows, PANEL);
    const int units = num_units(ceil_div(num_panels, run->at_once), quire_num_threads(engine));
    product job = {engine, run, linear, input, y, stride, num_panels, units};
    quire_run(engine, multiply_unit, &job, job.num_units);
}

void project(
    quire_engine *engine, const quire_variant *run, const quire_linear *linear, const quire_input *input, float *y) {
    project_apart(engine, run, linear, input, y, num_outputs(linear));
}

/* Rows: norms, rounding, rotation */

typedef struct {
    pass *step;
    const quire_layer *layer;
    const float *post_norm, *weight, *source;
    float residual_scale, output_scale; /* of what is added to the stream, and of the stream */
    int count, activation;
    size_t stride;
} row_job;

static int row_units(int num_rows) { return ceil_div(num_rows, ROWS_PER_UNIT); }

static void each_row(void *context, int unit, int num_rows, void (*one)(row_job *job, int row)) {
    const int first = unit * ROWS_PER_UNIT;
    for (int row = first; row < first + ROWS_PER_UNIT && row < num_rows; row++) one(context, row);
}

static void scale_row(float *x, int count, float factor) {
    for (int i = 0; i < count; i++) x[i] *= factor;
}

static void norm_one(row_job *job, int row) {
    const pass *step = job->step;
    const int size = step->model->hidden_size;
    const size_t at = (size_t)row * (size_t)size;
    const float eps = step->model->norm_eps;
    float *x = step->x + at, *added = step->mixed + at, *normed = step->normed + at;
    if (job->post_norm) step->run->norm(added, NULL, job->post_norm, size, eps, added);
    if (job->residual_scale != 1) scale_row(added, size, job->residual_scale);
    if (job->output_scale != 1) {
        step->run->add(x, added, size);
        scale_row(x, size, job->output_scale);
        if (job->weight) step->run->norm(x, NULL, job->weight, size, eps, normed);
        else memcpy(normed, x, (size_t)size * sizeof *x);
    } else if (job->weight) {
        step->run->norm(x, added, job->weight, size, eps, normed);
    } else {
        step->run->add(x, added, size);
        memcpy(normed, x, (size_t)size * sizeof *x);
    }
    step->run->quantize(normed, size, &job->step->input, row);
}

static void norm_unit(void *context, int unit, int thread) {
    (void)thread;
    each_row(context, unit, ((row_job *)context)->step->input.num_rows, norm_one);
}

/* Adds the output of the last product to the residual stream, with `post_norm` and `residual_scale` of its layer, and
   multiplies the stream by `output_scale`. The norm of the stream with `weight`, or the stream itself, becomes the input of
   the next product. */
static void norm_rows(
    pass *step, const float *post_norm, float residual_scale, float output_scale, const float *weight, int refine) {
    set_input(&step->input, step->batch->num_tokens, step->model->hidden_size, refine);
    row_job job = {.step = step, .post_norm = post_norm, .residual_scale = residual_scale,
                   .output_scale = output_scale, .weight = weight};
    quire_run(step->engine, norm_unit, &job, row_units(step->batch->num_tokens));
}

static void quantize_one(row_job *job, int row) {
    job->step->run->quantize(job->source + (size_t)row * job->stride, job->count, &job->step->input, row);
}

static void quantize_unit(void *context, int unit, int thread) {
    (void)thread;
    each_row(context, unit, ((row_job *)context)->step->input.num_rows, quantize_one);
}

static void gate_one(row_job *job, int row) {
    float *gate = (float *)job->source + (size_t)row * job->stride;
    job->step->run->gate(gate, gate + job->count, job->count, job->activation);
    job->step->run->quantize(gate, job->count, &job->step->input, row);
}

static void gate_unit(void *context, int unit, int thread) {
    (void)thread;
    each_row(context, unit, ((row_job *)context)->step->input.num_rows, gate_one);
}

void quantize_rows(pass *step, const float *source, int num_rows, int count, size_t stride, int refine) {
    set_input(&step->input, num_rows, count, refine);
    row_job job = {.step = step, .source = source, .count = count, .stride = stride};
    quire_run(step->engine, quantize_unit, &job, row_units(num_rows));
}

void gate_rows(pass *step, int activation, float *source, int count, int refine) {
    set_input(&step->input, step->batch->num_tokens, count, refine);
    row_job job = {
        .step = step, .activation = activation, .source = source, .count = count, .stride = 2 * (size_t)count};
    quire_run(step->engine, gate_unit, &job, row_units(step->batch->num_tokens));
}

/* Attention */

static int key_stride(int block_size) { return ceil_div(block_size, 8) * 8; }
static int value_stride(int head_size) { return ceil_div(head_size, 32) * 32; }

static size_t head_halves(int head_size, int block_size) { /* keys and values of one KV head in one block */
    return (size_t)head_size * (size_t)key_stride(block_size) + (size_t)block_size * (size_t)value_stride(head_size);
}

size_t quire_block_bytes(int num_kv_heads, int head_size, int block_size) {
    return 2 * rounded((size_t)num_kv_heads * head_halves(head_size, block_size));
}

static size_t block_bytes(const quire_model *model, const quire_layer *layer) {
    return quire_block_bytes(layer->num_kv_heads, layer->head_size, model->block_size);
}

/* Groups the rows of the batch into tiles for attention, and sets the sequence of each row. */
static void lay_tiles(pass *step) {
    const quire_batch *batch = step->batch;
    step->num_tiles = 0;
    for (int seq = 0; seq < batch->num_seqs; seq++) {
        for (int row = batch->first_rows[seq]; row < batch->first_rows[seq + 1]; row++) {
            step->sequences[row] = seq;
            if ((row - batch->first_rows[seq]) % MAX_QUERIES == 0) step->tiles[step->num_tiles++] = row;
        }
    }
}

static int piece_blocks(const quire_model *model) { return largest(PIECE / model->block_size, 1); }

static const int32_t *table_of(const pass *step, const quire_layer *layer, int row) {
    const int32_t *tables = layer->has_window_blocks ? step->batch->window_tables : step->batch->tables;
    return tables + (size_t)step->sequences[row] * (size_t)step->batch->table_stride;
}

/* Returns whether the keys and values of a row are in a shared block already. */
static int is_stored(const pass *step, const quire_layer *layer, int row) {
    const int32_t *starts = step->batch->kv_starts;
    return !layer->has_window_blocks && starts && step->batch->positions[row] < starts[step->sequences[row]];
}

/* Norms and rotates the heads of queries and keys. */
static void turn_heads(const pass *step, const quire_layer *layer, int position, float *qkv) {
    const int size = layer->head_size, heads = layer->num_heads;
    const int kv_heads = layer->is_shared ? 0 : layer->num_kv_heads, both = heads + kv_heads;
    const int half = layer->rotary_size / 2, is_width = layer->is_norm_of_width;
    const float eps = step->model->norm_eps;
    const size_t angle = (size_t)position * (size_t)half;
    float *keys = qkv + heads * size, *values = keys + kv_heads * size;
    if (layer->is_key_value) memcpy(values, keys, (size_t)(kv_heads * size) * sizeof *keys);
    for (int head = 0; head < kv_heads && layer->v_norm; head++)
        step->run->norm(values + head * size, NULL, layer->v_norm, size, eps, values + head * size);
    if (layer->q_norm && is_width) {
        step->run->norm(qkv, NULL, layer->q_norm, heads * size, eps, qkv);
        step->run->norm(keys, NULL, layer->k_norm, (both - heads) * size, eps, keys);
    }
    for (int head = 0; head < both; head++) {
        float *x = qkv + head * size;
        const float *weight = head < heads ? layer->q_norm : layer->k_norm;
        if (weight && !is_width) step->run->norm(x, NULL, weight, size, eps, x);
        if (half) step->run->rotate(x, layer->cosines + angle, layer->sines + angle, half);
    }
    if (layer->query_scales) scale_row(qkv, heads * size, layer->query_scales[position]);
}

static void store_one(row_job *job, int row) {
    pass *step = job->step;
    const quire_model *model = step->model;
    const quire_layer *layer = job->layer;
    const int size = layer->head_size, heads = layer->num_heads, kv_heads = layer->num_kv_heads;
    const int position = step->batch->positions[row], stride = key_stride(model->block_size);
    float *qkv = step->inner + (size_t)row * (size_t)qkv_size(layer);
    turn_heads(step, layer, position, qkv);
    if (layer->is_shared || is_stored(step, layer, row)) return;
    const int32_t *table = table_of(step, layer, row);
    uint16_t *block = layer->pool + (size_t)table[position / model->block_size] * (block_bytes(model, layer) / 2);
    const int slot = position % model->block_size;
    for (int head = 0; head < kv_heads; head++) {
        uint16_t *keys = block + (size_t)head * head_halves(size, model->block_size);
        uint16_t *values = keys + (size_t)size * (size_t)stride + (size_t)slot * (size_t)value_stride(size);
        const float *k = qkv + (heads + head) * size, *v = k + kv_heads * size;
        uint16_t halves[64];
        for (int first = 0; first < size; first += 64) {
            const int count = smallest(size - first, 64);
            step->run->halve(k + first, count, halves);
            for (int d = 0; d < count; d++) keys[(first + d) * stride + slot] = halves[d];
        }
        step->run->halve(v, size, values);
    }
}

/* Rows of a prompt whose keys share cache lines are stored by one thread: a line holds a number of each of 32 keys. */
static int stored_per_unit(const pass *step) {
    const int share = step->batch->num_tokens / (2 * quire_num_threads(step->engine));
    return share < 32 ? ROWS_PER_UNIT : 32;
}

static void store_unit(void *context, int unit, int thread) {
    row_job *job = context;
    const int size = stored_per_unit(job->step), first = unit * size;
    (void)thread;
    for (int row = first; row < smallest(first + size, job->step->batch->num_tokens); row++) store_one(job, row);
}

static attention_shape shape_of(const pass *step, const quire_layer *layer, int kv_head) {
    const quire_model *model = step->model;
    const int head_size = layer->head_size, block_size = model->block_size;
    return (attention_shape){
        .num_heads = layer->num_heads / layer->num_kv_heads,
        .head_size = head_size,
        .block_size = block_size,
        .key_stride = key_stride(block_size),
        .score_stride = ceil_div(block_size, 32) * 32,
        .head_stride = value_stride(head_size),
        .scale = layer->attention_scale,
        .cap = layer->attention_softcap,
        .window = layer->window,
        .piece_blocks = piece_blocks(model),
        .is_half = layer->is_half_attention,
        .sinks = layer->sinks ? layer->sinks + kv_head * (layer->num_heads / layer->num_kv_heads) : NULL,
        .layer = layer->pool + (size_t)kv_head * head_halves(head_size, block_size),
        .block_halves = block_bytes(model, layer) / 2,
        .values_at = (size_t)head_size * (size_t)key_stride(block_size),
    };
}

/* Returns the rows of a tile, with all pieces that they see. */
static attention_rows rows_of(const pass *step, const quire_layer *layer, const attention_shape *shape, int tile) {
    const quire_batch *batch = step->batch;
    const int row = step->tiles[tile], left = batch->first_rows[step->sequences[row] + 1] - row;
    const int count = smallest(left, MAX_QUERIES), position = batch->positions[row];
    const int piece = shape->piece_blocks * shape->block_size;
    return (attention_rows){
        .count = count,
        .position = position,
        .table = table_of(step, layer, row),
        .q_stride = (size_t)qkv_size(layer),
        .out_stride = (size_t)(layer->num_heads * layer->head_size),
        .first_piece = first_key(shape, position) / piece,
        .last_piece = (position + count - 1) / piece + 1,
    };
}

static size_t records_of(const quire_layer *layer, const attention_shape *shape, int num_rows, int num_pieces) {
    return (size_t)num_rows * (size_t)num_pieces * (size_t)layer->num_heads * record_floats(shape);
}

static int is_divided_alike(const quire_layer *a, const quire_layer *b) {
    return a->window == b->window && a->num_heads == b->num_heads && a->num_kv_heads == b->num_kv_heads &&
           a->head_size == b->head_size;
}

/* Divides the tiles that would keep a thread busy while the others have nothing left: those of which one KV head is more
   than half of a thread's share. The results are the same either way. */
static void lay_parts(pass *step, const quire_layer *layer) {
    const attention_shape shape = shape_of(step, layer, 0);
    const int kv_heads = layer->num_kv_heads, num_threads = quire_num_threads(step->engine);
    int64_t total = 0;
    size_t used = 0;
    if (step->divided && is_divided_alike(step->divided, layer)) return;
    step->divided = layer;
    step->num_parts = step->num_merges = 0;
    for (int tile = 0; tile < step->num_tiles; tile++) {
        const attention_rows rows = rows_of(step, layer, &shape, tile);
        total += (int64_t)rows.count * (rows.last_piece - rows.first_piece);
    }
    for (int tile = 0; tile < step->num_tiles; tile++) {
        const attention_rows rows = rows_of(step, layer, &shape, tile);
        const int num_pieces = rows.last_piece - rows.first_piece;
        const size_t needed = records_of(layer, &shape, rows.count, num_pieces);
        const int is_large = 2 * num_threads * (int64_t)rows.count * num_pieces > total * kv_heads;
        if (num_threads == 1 || num_pieces == 1 || !is_large || used + needed > step->max_records) {
            step->parts[step->num_parts++] = (attention_part){tile, rows.first_piece, rows.last_piece, 0, 0};
            continue;
        }
        step->merges[step->num_merges++] = step->num_parts;
        for (int piece = rows.first_piece; piece < rows.last_piece; piece++)
            step->parts[step->num_parts++] = (attention_part){
                tile, piece, piece + 1, 1,
                used + records_of(layer, &shape, rows.count, piece - rows.first_piece) / (size_t)kv_heads};
        used += needed;
    }
}

/* Returns where a KV head's records of a part begin. A divided tile has records [K, pieces, rows, heads of a KV head]. */
static float *records_at(
    const pass *step, const quire_layer *layer, const attention_shape *shape, const attention_part *part, int kv_head) {
    const attention_rows rows = rows_of(step, layer, shape, part->tile);
    const int num_pieces = rows.last_piece - rows.first_piece;
    const size_t of_head = records_of(layer, shape, rows.count, num_pieces) / (size_t)layer->num_kv_heads;
    return step->records + part->records + (size_t)kv_head * of_head;
}

static void attend_unit(void *context, int unit, int thread) {
    const row_job *job = context;
    const pass *step = job->step;
    const int kv_heads = job->layer->num_kv_heads, kv_head = unit % kv_heads;
    const attention_part *part = &step->parts[unit / kv_heads];
    const attention_shape shape = shape_of(step, job->layer, kv_head);
    attention_rows rows = rows_of(step, job->layer, &shape, part->tile);
    rows.first_piece = part->first_piece;
    rows.last_piece = part->last_piece;
    if (part->is_divided) rows.records = records_at(step, job->layer, &shape, part, kv_head);
    const size_t row = (size_t)step->tiles[part->tile], head = (size_t)(kv_head * shape.num_heads * shape.head_size);
    step->run->attend(&shape, &rows, step->inner + row * rows.q_stride + head, quire_own_memory(step->engine, thread),
                      step->mixed + row * rows.out_stride + head);
}

static void merge_unit(void *context, int unit, int thread) {
    (void)thread;
    const row_job *job = context;
    const pass *step = job->step;
    const int kv_heads = job->layer->num_kv_heads, kv_head = unit % kv_heads;
    const attention_part *part = &step->parts[step->merges[unit / kv_heads]];
    const attention_shape shape = shape_of(step, job->layer, kv_head);
    attention_rows rows = rows_of(step, job->layer, &shape, part->tile);
    rows.records = records_at(step, job->layer, &shape, part, kv_head);
    const size_t row = (size_t)step->tiles[part->tile], head = (size_t)(kv_head * shape.num_heads * shape.head_size);
    step->run->merge(&shape, &rows, step->mixed + row * rows.out_stride + head);
}

static void attend_rows(row_job *job) {
    pass *step = job->step;
    const int kv_heads = job->layer->num_kv_heads;
    lay_parts(step, job->layer);
    quire_run(step->engine, attend_unit, job, step->num_parts * kv_heads);
    quire_run(step->engine, merge_unit, job, step->num_merges * kv_heads);
}

static void gate_output(row_job *job, int row) {
    const pass *step = job->step;
    const int count = job->layer->num_heads * job->layer->head_size, width = qkv_size(job->layer);
    float *gate = step->inner + (size_t)row * (size_t)width + width - count;
    step->run->gate(gate, step->mixed + (size_t)row * (size_t)count, count, QUIRE_SIGMOID);
    step->run->quantize(gate, count, &job->step->input, row);
}

static void gate_output_unit(void *context, int unit, int thread) {
    (void)thread;
    each_row(context, unit, ((row_job *)context)->step->input.num_rows, gate_output);
}

/* Runs attention: from step->inner to step->input. */
static void run_attention(pass *step, const quire_layer *layer) {
    const int num_tokens = step->batch->num_tokens, count = layer->num_heads * layer->head_size;
    row_job job = {.step = step, .layer = layer};
    quire_run(step->engine, store_unit, &job, ceil_div(num_tokens, stored_per_unit(step)));
    attend_rows(&job);
    if (!layer->has_gate) {
        quantize_rows(step, step->mixed, num_tokens, count, (size_t)count, step->model->refine.o);
        return;
    }
    set_input(&step->input, num_tokens, count, step->model->refine.o);
    quire_run(step->engine, gate_output_unit, &job, row_units(num_tokens));
}

/* Adds the output of the last part of the layer before layer `index`; there is none before the first. */
static void add_layer(pass *step, int index, const float *weight, int refine) {
    const quire_layer *before = index ? &step->model->layers[index - 1] : NULL;
    const float *post_norm = before ? before->ple_norm ? before->ple_norm : before->post_mlp_norm : NULL;
    const float scale = before && !before->ple_norm ? before->residual_scale : 1;
    norm_rows(step, post_norm, scale, before ? before->output_scale : 1, weight, refine);
}

static void run_dense(pass *step, const quire_layer *layer) {
    project(step->engine, step->run, &layer->gate_up, &step->input, step->inner);
    gate_rows(step, layer->activation, step->inner, ffn_size(layer), step->model->refine.down);
    project(step->engine, step->run, &layer->down, &step->input, step->mixed);
}

static void run_layer(pass *step, int index) {
    const quire_model *model = step->model;
    const quire_layer *layer = &model->layers[index];
    add_layer(step, index, layer->input_norm, model->refine.qkv);
    project_apart(step->engine, step->run, &layer->qkv, &step->input, step->inner, qkv_size(layer));
    if (is_attention(layer)) run_attention(step, layer);
    else run_recurrence(step, layer);
    project(step->engine, step->run, &layer->o, &step->input, step->mixed);
    norm_rows(step, layer->post_attention_norm, layer->residual_scale, 1, layer->mlp_norm, model->refine.gate_up);
    if (has_dense_mlp(layer)) run_dense(step, layer);
    if (layer->experts_norm) run_parallel_experts(step, layer);
    else if (layer->num_experts) run_experts(step, layer);
    if (!layer->ple_norm) return;
    norm_rows(step, layer->post_mlp_norm, layer->residual_scale, 1, NULL, model->refine.gate_up);
    run_layer_embedding(step, index);
}

/* The whole pass */

size_t carve(void *base, size_t *used, size_t num_bytes, void **out) {
    if (base) *out = (char *)base + *used;
    *used += rounded(num_bytes);
    return *used;
}

size_t lay_input(quire_input *input, void *base) {
    const size_t rows = (size_t)input->num_rows, cells = rows * (size_t)(input->num_groups * input->num_copies);
    const size_t steps = rows * (size_t)input->num_refined;
    size_t used = 0;
    carve(base, &used, cells * GROUP, (void **)&input->q);
    carve(base, &used, cells * 4, (void **)&input->scales);
    carve(base, &used, cells * 4, (void **)&input->sums);
    if (input->num_refined) carve(base, &used, cells * STEPS * 4, (void **)&input->keys);
    return carve(base, &used, steps * sizeof *input->refined, (void **)&input->refined);
}

/* Returns the floats for the states of all tiles of a layer that may be divided. */
static size_t max_records(const pass *step, const quire_layer *layer, int num_pieces) {
    const attention_shape shape = shape_of(step, layer, 0);
    const int num_threads = quire_num_threads(step->engine);
    const int max_divided = 2 * num_threads / layer->num_kv_heads + 1; /* each has more than its share of the work */
    const int num_rows = num_threads == 1 ? 0 : smallest(step->batch->num_tokens, max_divided * MAX_QUERIES);
    const size_t wanted = records_of(layer, &shape, num_rows, num_pieces);
    return wanted < MAX_RECORDS ? wanted : MAX_RECORDS;
}

/* Lays out the memory of the parts of attention. Without a base, only returns its size. */
static size_t lay_attention(pass *step, void *base) {
    const quire_batch *batch = step->batch;
    const quire_model *model = step->model;
    const int piece = piece_blocks(model) * model->block_size;
    size_t num_parts = 0, used = 0;
    int most_pieces = 0;
    for (int seq = 0; seq < batch->num_seqs; seq++) {
        const int num_rows = batch->first_rows[seq + 1] - batch->first_rows[seq];
        const int num_pieces = batch->positions[batch->first_rows[seq + 1] - 1] / piece + 1;
        num_parts += (size_t)ceil_div(num_rows, MAX_QUERIES) * (size_t)num_pieces;
        most_pieces = largest(most_pieces, num_pieces);
    }
    step->max_records = 0;
    for (int index = 0; index < model->num_layers && most_pieces > 1; index++) {
        if (!is_attention(&model->layers[index])) continue;
        const size_t wanted = max_records(step, &model->layers[index], most_pieces);
        if (wanted > step->max_records) step->max_records = wanted;
    }
    step->divided = NULL;
    carve(base, &used, num_parts * sizeof(attention_part), (void **)&step->parts);
    carve(base, &used, num_parts * 4, (void **)&step->merges);
    return carve(base, &used, step->max_records * 4, (void **)&step->records);
}

typedef struct { /* numbers per row, in the layer that has most */
    int input; /* of a product */
    int inner, mixed;
} widths;

static widths widest(const quire_model *model) {
    widths most = {model->hidden_size, 2 * model->ple_size, model->hidden_size};
    for (int index = 0; index < model->num_layers; index++) {
        const quire_layer *layer = &model->layers[index];
        const int heads = layer->o.parts[0].cols, ffn = ffn_size(layer);
        most.input = largest(most.input, largest(largest(heads, ffn), model->ple_size));
        most.inner = largest(most.inner, largest(qkv_size(layer), 2 * ffn));
        most.mixed = largest(most.mixed, heads);
        if (layer->shared_gate) most.inner = largest(most.inner, model->hidden_size);
    }
    return most;
}

static int has_parallel_experts(const quire_model *model) {
    for (int index = 0; index < model->num_layers; index++)
        if (model->layers[index].experts_norm) return 1;
    return 0;
}

/* Lays out the working memory. Without a base, only returns its size. */
static size_t lay_out(pass *step, void *base) {
    const size_t rows = (size_t)largest(step->batch->num_tokens, step->batch->num_logits);
    const size_t hidden = (size_t)step->model->hidden_size;
    const widths most = widest(step->model);
    size_t used = 0;
    carve(base, &used, rows * hidden * 4, (void **)&step->x);
    carve(base, &used, rows * hidden * 4, (void **)&step->normed);
    carve(base, &used, rows * (size_t)most.inner * 4, (void **)&step->inner);
    carve(base, &used, rows * (size_t)most.mixed * 4, (void **)&step->mixed);
    quire_input input = {0};
    set_input(&input, (int)rows, most.input, most_refined(step->model));
    used += lay_input(&input, base ? (char *)base + used : NULL);
    if (base) step->input = input;
    carve(base, &used, rows * 4, (void **)&step->sequences);
    carve(base, &used, rows * 4, (void **)&step->tiles);
    if (has_parallel_experts(step->model)) {
        carve(base, &used, rows * hidden * 4, (void **)&step->dense);
        carve(base, &used, rows * hidden * 4, (void **)&step->scored);
    }
    const size_t embeddings = (size_t)step->model->num_layers * (size_t)step->model->ple_size;
    carve(base, &used, rows * embeddings * 4, (void **)&step->embeddings);
    used += lay_attention(step, base ? (char *)base + used : NULL);
    return used + lay_experts(step, base ? (char *)base + used : NULL);
}

static void embed(pass *step) {
    const quire_model *model = step->model;
    const quire_matrix *matrix = &model->embedding.parts[0];
    for (int row = 0; row < step->batch->num_tokens; row++) {
        float *x = step->x + (size_t)row * (size_t)model->hidden_size;
        quire_unpack(matrix, step->batch->tokens[row], x);
        if (model->embedding_scale != 1)
            for (int i = 0; i < model->hidden_size; i++) x[i] *= model->embedding_scale;
        memset(step->mixed + (size_t)row * (size_t)model->hidden_size, 0, (size_t)model->hidden_size * sizeof(float));
    }
}

static void judge(const pass *step) {
    const int hidden = step->model->hidden_size;
    for (int seq = 0; seq < step->batch->num_seqs; seq++) {
        const float *x = step->normed + (size_t)(step->batch->first_rows[seq + 1] - 1) * (size_t)hidden;
        float nothing = 0;
        for (int i = 0; i < hidden; i++) nothing += x[i] - x[i];
        step->batch->is_sound[seq] = nothing == 0;
    }
}

static void make_logits(pass *step, const float *hidden, int num_rows, float *logits) {
    const quire_model *model = step->model;
    const int size = model->hidden_size;
    quantize_rows(step, hidden, num_rows, size, (size_t)size, model->refine.head);
    project(step->engine, step->run, &model->head, &step->input, logits);
    const float cap = model->logit_softcap;
    const size_t count = (size_t)num_rows * (size_t)model->vocab_size;
    if (model->logit_scale != 1)
        for (size_t i = 0; i < count; i++) logits[i] *= model->logit_scale;
    if (cap == 0) return;
    for (size_t i = 0; i < count; i++) logits[i] = cap * tanhf(logits[i] / cap);
}

/* Copies the rows that need logits next to each other. */
static const float *gather_rows(const pass *step) {
    const quire_batch *batch = step->batch;
    const size_t hidden = (size_t)step->model->hidden_size;
    for (int i = 0; i < batch->num_logits; i++) {
        const float *row = step->normed + (size_t)batch->logit_rows[i] * hidden;
        memcpy(step->x + (size_t)i * hidden, row, hidden * sizeof(float));
    }
    return step->x;
}

static int reserve(pass *step) {
    void *base = quire_shared_memory(step->engine, lay_out(step, NULL));
    if (!base) return -1;
    lay_out(step, base);
    size_t most = panel_scratch(ceil_div(widest(step->model).input, GROUP));
    const size_t embeddings = (size_t)step->model->num_layers * (size_t)step->model->ple_size;
    if (embeddings > most) most = embeddings;
    for (int index = 0; index < step->model->num_layers; index++) {
        const quire_layer *layer = &step->model->layers[index];
        size_t mixer = delta_scratch(layer->recurrence.key_size);
        if (is_attention(layer)) {
            const attention_shape shape = shape_of(step, layer, 0);
            mixer = step->run->attend_scratch(&shape);
        }
        const size_t expert = layer->num_experts ? panel_scratch(ceil_div(expert_size(layer), GROUP)) : 0;
        if (mixer > most) most = mixer;
        if (expert > most) most = expert;
    }
    return quire_reserve_own(step->engine, 4 * most + 64);
}

int quire_forward(quire_engine *engine, const quire_model *model, const quire_batch *batch) {
    pass step = {.engine = engine, .run = quire_variant_now(), .model = model, .batch = batch};
    if (reserve(&step)) return -1;
    lay_tiles(&step);
    embed(&step);
    if (model->ple_size) make_layer_embeddings(&step);
    for (int index = 0; index < model->num_layers; index++) run_layer(&step, index);
    add_layer(&step, model->num_layers, model->norm, 0);
    judge(&step);
    if (batch->hidden)
        memcpy(batch->hidden, step.normed, (size_t)batch->num_tokens * (size_t)model->hidden_size * sizeof(float));
    if (batch->num_logits) make_logits(&step, gather_rows(&step), batch->num_logits, batch->logits);
    return 0;
}

int quire_logits(quire_engine *engine, const quire_model *model, const float *hidden, int num_rows, float *logits) {
    const quire_batch batch = {.num_tokens = num_rows};
    pass step = {.engine = engine, .run = quire_variant_now(), .model = model, .batch = &batch};
    if (reserve(&step)) return -1;
    make_logits(&step, hidden, num_rows, logits);
    return 0;
}

int quire_project(quire_engine *engine, const quire_linear *linear, const float *x, int num_rows, int refine, float *y) {
    const int cols = linear->parts[0].cols;
    quire_input input = {0};
    set_input(&input, num_rows, cols, refine);
    void *memory = quire_shared_memory(engine, lay_input(&input, NULL));
    if (!memory || quire_reserve_own(engine, 4 * panel_scratch(input.num_groups) + 64)) return -1;
    lay_input(&input, memory);
    const quire_variant *run = quire_variant_now();
    for (int row = 0; row < num_rows; row++) run->quantize(x + (size_t)row * (size_t)cols, cols, &input, row);
    project(engine, run, linear, &input, y);
    return 0;
}

static int has_blocks(const quire_layer *layer, int has_window_blocks) {
    return is_attention(layer) && layer->has_window_blocks == has_window_blocks;
}

void quire_copy_blocks(const quire_model *model, int has_window_blocks, const int32_t *pairs, int num_pairs) {
    for (int index = 0; index < model->num_layers; index++) {
        if (!has_blocks(&model->layers[index], has_window_blocks)) continue;
        const size_t size = block_bytes(model, &model->layers[index]);
        char *pool = (char *)model->layers[index].pool;
        for (int i = 0; i < num_pairs; i++)
            memcpy(pool + (size_t)pairs[2 * i + 1] * size, pool + (size_t)pairs[2 * i] * size, size);
    }
}

void quire_purge_blocks(const quire_model *model, int has_window_blocks, const int32_t *blocks, int num_blocks) {
    for (int index = 0; index < model->num_layers; index++)
        for (int i = 0; i < num_blocks && has_blocks(&model->layers[index], has_window_blocks); i++) {
            const size_t halves = block_bytes(model, &model->layers[index]) / 2;
            uint16_t *at = model->layers[index].pool + (size_t)blocks[i] * halves;
            for (size_t j = 0; j < halves; j++)
                if ((at[j] & 0x7c00) == 0x7c00) at[j] = 0;
        }
}
