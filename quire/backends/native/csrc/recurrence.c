/* Layers with a state instead of keys and values: gated delta nets, and short convolutions.

   The rows of a sequence are one or more segments. A segment begins with the state of its source slot and leaves the
   state after its last row in its target slot, from which the next segment of the sequence begins. Slot 0 holds zeros and
   is never a target. */
#include <math.h>
#include <string.h>

#include "pass.h"

#define UNIT_EPS 1e-6f /* of the lengths of queries and keys */

typedef struct {
    pass *step;
    const quire_layer *layer;
    int num_ranges; /* units of a sequence, or of one head of a sequence */
} recurrence_job;

static int range_start(const recurrence_job *job, int range, int count) {
    return (int)((int64_t)count * range / job->num_ranges);
}

/* Returns how many units to make of `count` indivisible parts in each of `num_others`. */
static int num_ranges(const pass *step, int num_others, int count) {
    const int wanted = ceil_div(UNITS_PER_THREAD * quire_num_threads(step->engine), num_others);
    return largest(1, smallest(wanted, count));
}

static float *row_at(const pass *step, const quire_layer *layer, int row) {
    return step->inner + (size_t)row * (size_t)num_outputs(&layer->qkv);
}

/* Convolution of channels [first, last) of all rows of a sequence. */
static void convolve_sequence(const pass *step, const quire_layer *layer, int seq, int first, int last) {
    const quire_recurrence *net = &layer->recurrence;
    const size_t size = (size_t)(net->num_taps - 1) * (size_t)net->num_channels;
    const int is_short = layer->mixer == QUIRE_SHORT_CONV, width = net->num_channels;
    const conv_shape shape = {
        .weight = net->weight, .bias = net->bias, .channels = (size_t)width, .num_taps = net->num_taps,
        .has_silu = !is_short, .before = is_short ? -2 * width : 0, .after = is_short ? -width : 0};
    for (int i = step->batch->first_segments[seq]; i < step->batch->first_segments[seq + 1]; i++) {
        const quire_segment *segment = &step->batch->segments[i];
        const conv_rows rows = {
            .x = row_at(step, layer, segment->first_row) + (is_short ? 2 * width : 0),
            .stride = (size_t)num_outputs(&layer->qkv),
            .count = segment->last_row - segment->first_row,
            .old = net->rows + (size_t)segment->source * size,
            .new = net->rows + (size_t)segment->target * size};
        step->run->convolve(&shape, &rows, first, last);
    }
}

static void short_conv_unit(void *context, int unit, int thread) {
    (void)thread;
    const recurrence_job *job = context;
    const int seq = unit / job->num_ranges, range = unit % job->num_ranges, width = job->layer->recurrence.num_channels;
    const int groups = ceil_div(width, GROUP);
    convolve_sequence(job->step, job->layer, seq, GROUP * range_start(job, range, groups),
                      smallest(width, GROUP * range_start(job, range + 1, groups)));
}

/* Heads of queries, then of keys, then of values. */
static int first_channel(const quire_recurrence *net, int head) {
    const int num_keys = 2 * net->num_key_heads;
    if (head <= num_keys) return head * net->key_size;
    return num_keys * net->key_size + (head - num_keys) * net->value_size;
}

/* Replaces the numbers that control the state of a head in one row: a becomes the decay, b the strength of the change. */
static void set_decay(const quire_recurrence *net, int head, float *a, float *b) {
    const float x = a[head] + net->dt_bias[head], softplus = x > 20 ? x : log1pf(expf(x));
    a[head] = expf(net->decays[head] * softplus);
    b[head] = 1 / (1 + expf(-b[head]));
}

/* Convolves some heads of a sequence, and makes queries and keys of length 1. */
static void prepare_unit(void *context, int unit, int thread) {
    (void)thread;
    const recurrence_job *job = context;
    const pass *step = job->step;
    const quire_recurrence *net = &job->layer->recurrence;
    const int num_keys = 2 * net->num_key_heads, num_heads = num_keys + net->num_value_heads;
    const int seq = unit / job->num_ranges, range = unit % job->num_ranges;
    const int first = range_start(job, range, num_heads), last = range_start(job, range + 1, num_heads);
    const float scale = 1 / sqrtf((float)net->key_size);
    convolve_sequence(step, job->layer, seq, first_channel(net, first), first_channel(net, last));
    for (int row = step->batch->first_rows[seq]; row < step->batch->first_rows[seq + 1]; row++) {
        float *x = row_at(step, job->layer, row), *b = x + net->num_channels + net->num_value_heads * net->value_size;
        for (int head = first; head < last; head++)
            if (head >= num_keys) set_decay(net, head - num_keys, b + net->num_value_heads, b);
            else step->run->unit(x + head * net->key_size, net->key_size, UNIT_EPS, head < num_keys / 2 ? scale : 1);
    }
}

static void copy_columns(const quire_recurrence *net, int source, int target, int head, int first, int last) {
    const size_t size = (size_t)net->key_size * (size_t)net->value_size, heads = (size_t)net->num_value_heads;
    const float *from = net->matrices + ((size_t)source * heads + (size_t)head) * size;
    float *to = net->matrices + ((size_t)target * heads + (size_t)head) * size;
    if (source == target) return;
    for (int i = 0; i < net->key_size; i++, from += net->value_size, to += net->value_size)
        memcpy(to + first, from + first, (size_t)(last - first) * sizeof *to);
}

/* Updates some columns of one head's state through all segments of a sequence. */
static void delta_unit(void *context, int unit, int thread) {
    const recurrence_job *job = context;
    const pass *step = job->step;
    const quire_recurrence *net = &job->layer->recurrence;
    const int heads = net->num_value_heads, range = unit % job->num_ranges, head = unit / job->num_ranges % heads;
    const int seq = unit / job->num_ranges / heads, groups = ceil_div(net->value_size, GROUP);
    const int first = GROUP * range_start(job, range, groups);
    const int last = smallest(net->value_size, GROUP * range_start(job, range + 1, groups));
    const int key_head = net->is_tiled ? head % net->num_key_heads : head / (heads / net->num_key_heads);
    const size_t size = (size_t)net->key_size * (size_t)net->value_size;
    const delta_shape shape = {net->key_size, net->value_size};
    for (int i = step->batch->first_segments[seq]; i < step->batch->first_segments[seq + 1]; i++) {
        const quire_segment *segment = &step->batch->segments[i];
        float *x = row_at(step, job->layer, segment->first_row), *b = x + net->num_channels + heads * net->value_size;
        const delta_rows rows = {
            .count = segment->last_row - segment->first_row,
            .stride = (size_t)num_outputs(&job->layer->qkv),
            .q = x + first_channel(net, key_head),
            .k = x + first_channel(net, net->num_key_heads + key_head),
            .v = x + first_channel(net, 2 * net->num_key_heads + head),
            .decay = b + heads + head,
            .beta = b + head,
            .state = net->matrices + ((size_t)segment->target * (size_t)heads + (size_t)head) * size};
        copy_columns(net, segment->source, segment->target, head, first, last);
        step->run->delta(&shape, &rows, first, last, quire_own_memory(step->engine, thread));
    }
}

/* Makes an input of the normed outputs of the heads times silu(z). The product takes the place of z. */
static void finish_unit(void *context, int unit, int thread) {
    (void)thread;
    const recurrence_job *job = context;
    const pass *step = job->step;
    const quire_recurrence *net = &job->layer->recurrence;
    const int size = net->value_size, width = net->num_value_heads * size, first = unit * ROWS_PER_UNIT;
    for (int row = first; row < smallest(first + ROWS_PER_UNIT, step->batch->num_tokens); row++) {
        float *x = row_at(step, job->layer, row), *out = x + 2 * net->num_key_heads * net->key_size;
        float *z = x + net->num_channels;
        for (int head = 0; head < net->num_value_heads; head++)
            step->run->norm(out + head * size, NULL, net->norm, size, step->model->norm_eps, out + head * size);
        step->run->gate(z, out, width, QUIRE_SILU);
        step->run->quantize(z, width, &job->step->input, row);
    }
}

static void run_delta_net(pass *step, const quire_layer *layer) {
    const quire_recurrence *net = &layer->recurrence;
    const int num_seqs = step->batch->num_seqs, heads = net->num_value_heads;
    recurrence_job job = {step, layer, num_ranges(step, num_seqs, 2 * net->num_key_heads + heads)};
    quire_run(step->engine, prepare_unit, &job, num_seqs * job.num_ranges);
    job.num_ranges = num_ranges(step, num_seqs * heads, ceil_div(net->value_size, GROUP));
    quire_run(step->engine, delta_unit, &job, num_seqs * heads * job.num_ranges);
    set_input(&step->input, step->batch->num_tokens, heads * net->value_size, step->model->refine.o);
    quire_run(step->engine, finish_unit, &job, ceil_div(step->batch->num_tokens, ROWS_PER_UNIT));
}

void run_recurrence(pass *step, const quire_layer *layer) {
    if (layer->mixer == QUIRE_DELTA_NET) {
        run_delta_net(step, layer);
        return;
    }
    const int num_seqs = step->batch->num_seqs, width = layer->recurrence.num_channels;
    recurrence_job job = {step, layer, num_ranges(step, num_seqs, ceil_div(width, GROUP))};
    quire_run(step->engine, short_conv_unit, &job, num_seqs * job.num_ranges);
    quantize_rows(step, step->inner + 2 * width, step->batch->num_tokens, width, 3 * (size_t)width, step->model->refine.o);
}
