/* Routed experts: a router chooses a few of many MLPs for every row.

   Everything that is computed for a row depends on that row only: its scores, its choice, the products of its experts,
   and their sum in the order of choice. Rows that chose the same expert are multiplied together, so that its weights are
   read once; the products of a row are the same with any other rows. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "pass.h"

enum { MAX_ROUTED = 512 }; /* rows routed at a time: limits the working memory */
#define SIGMOID_FLOOR 1e-6f /* added to the sum of chosen sigmoids */
enum { ROWS_PER_SCORE = 4 }; /* rows that share a read of the router's weights */

typedef struct {
    pass *step;
    const quire_layer *layer;
    int is_down;          /* which matrices `multiply_unit` multiplies */
    int experts_per_unit; /* of `score_unit` */
} expert_job;

static int num_choices(const expert_job *job) { return job->step->routed.num_rows * job->layer->num_chosen; }

static int choices_of(const routing *routed, int expert) {
    return routed->first_choices[expert + 1] - routed->first_choices[expert];
}

/* The choice */

static void score_unit(void *context, int unit, int thread) {
    (void)thread;
    const expert_job *job = context;
    const routing *routed = &job->step->routed;
    const int num_experts = job->layer->num_experts, size = job->step->model->hidden_size;
    const int num_tiles = ceil_div(routed->num_rows, ROWS_PER_SCORE);
    const int row = unit % num_tiles * ROWS_PER_SCORE, count = smallest(routed->num_rows - row, ROWS_PER_SCORE);
    const int first = unit / num_tiles * job->experts_per_unit;
    const float *rows = job->layer->router_norm ? job->step->scored : job->step->normed;
    const float *x = rows + (size_t)(routed->first_row + row) * (size_t)size;
    for (int expert = first; expert < smallest(first + job->experts_per_unit, num_experts); expert++)
        job->step->run->dot(job->layer->router + (size_t)expert * (size_t)size, x, (size_t)size, count, size,
                            routed->scores + (size_t)row * (size_t)num_experts + expert, (size_t)num_experts);
}

static void score_rows(expert_job *job) {
    const int num_tiles = ceil_div(job->step->routed.num_rows, ROWS_PER_SCORE), num_experts = job->layer->num_experts;
    const int wanted = ceil_div(UNITS_PER_THREAD * quire_num_threads(job->step->engine), num_tiles);
    job->experts_per_unit = largest(ceil_div(num_experts, wanted), 8);
    quire_run(job->step->engine, score_unit, job, num_tiles * ceil_div(num_experts, job->experts_per_unit));
}

/* Turns logits into scores in place, writes the keys for the choice, and returns the sum of the scores. */
static float score_logits(const quire_layer *layer, float *scores, float *keys) {
    const int num_experts = layer->num_experts;
    float peak, sum = 0;
    for (int i = 0; i < num_experts && layer->router_bias; i++) scores[i] += layer->router_bias[i];
    peak = scores[0];
    for (int i = 1; i < num_experts; i++) peak = scores[i] > peak ? scores[i] : peak;
    for (int i = 0; i < num_experts; i++) {
        sum += scores[i] = layer->has_sigmoid ? 1 / (1 + expf(-scores[i])) : expf(scores[i] - peak);
        keys[i] = scores[i] + (layer->choice_bias ? layer->choice_bias[i] : 0);
        if (keys[i] < -FLT_MAX) keys[i] = -FLT_MAX; /* lower is for the ones that have been chosen */
    }
    return sum;
}

/* Chooses the experts with the highest keys; of equal ones, those with lower numbers. If scores are NaN, the choice is
   arbitrary and all weights are NaN. */
static void choose_one(const expert_job *job, int row) {
    const quire_layer *layer = job->layer;
    const routing *routed = &job->step->routed;
    const int num_experts = layer->num_experts, num_chosen = layer->num_chosen;
    float *scores = routed->scores + (size_t)row * (size_t)num_experts;
    int32_t *chosen = routed->chosen + (size_t)row * (size_t)num_chosen;
    float *weights = routed->weights + (size_t)row * (size_t)num_chosen;
    float *keys = routed->keys + (size_t)row * (size_t)num_experts;
    const float sum = score_logits(layer, scores, keys);
    float sum_of_chosen = layer->has_sigmoid ? SIGMOID_FLOOR : 0;
    for (int place = 0; place < num_chosen; place++) {
        int best = -1;
        for (int i = 0; i < num_experts; i++)
            if (keys[i] != -INFINITY && (best < 0 || keys[i] > keys[best])) best = i;
        chosen[place] = best;
        weights[place] = scores[best];
        sum_of_chosen += scores[best];
        keys[best] = -INFINITY;
    }
    const float divisor = layer->renormalizes ? sum_of_chosen : layer->has_sigmoid ? 1 : sum;
    const float factor = layer->experts_scale / divisor;
    for (int place = 0; place < num_chosen; place++) {
        weights[place] = sum - sum == 0 ? weights[place] * factor : NAN;
        if (layer->expert_scales) weights[place] *= layer->expert_scales[chosen[place]];
    }
}

static void choose_unit(void *context, int unit, int thread) {
    (void)thread;
    const expert_job *job = context;
    const int first = unit * ROWS_PER_UNIT;
    for (int row = first; row < smallest(first + ROWS_PER_UNIT, job->step->routed.num_rows); row++) choose_one(job, row);
}

/* Sorts the choices by expert, then by row. */
static void sort_choices(const expert_job *job) {
    const routing *routed = &job->step->routed;
    const int num_experts = job->layer->num_experts, num_chosen = job->layer->num_chosen, count = num_choices(job);
    int32_t *next = routed->first_choices; /* ends up one expert further: position 0 of expert e is entry e + 1 */
    memset(next, 0, (size_t)(num_experts + 2) * sizeof *next);
    for (int i = 0; i < count; i++) next[routed->chosen[i] + 2]++;
    for (int i = 2; i < num_experts + 2; i++) next[i] += next[i - 1];
    for (int i = 0; i < count; i++) {
        const int place = next[routed->chosen[i] + 1]++;
        routed->places[i] = place;
        routed->rows[place] = i / num_chosen;
    }
}

/* The products */

static void copy_row(const quire_input *from, int row, quire_input *to, int place) {
    const quire_input a = view_rows(from, row, 1), b = view_rows(to, place, 1);
    const size_t cells = (size_t)(from->num_groups * from->num_copies), steps = (size_t)from->num_refined;
    memcpy(b.q, a.q, cells * GROUP);
    memcpy(b.scales, a.scales, cells * sizeof *a.scales);
    memcpy(b.sums, a.sums, cells * sizeof *a.sums);
    memcpy(b.refined, a.refined, steps * sizeof *a.refined);
}

/* Copies the rounded rows in the order of the choices, so that those of an expert are consecutive. An expert with one row
   reads it where it is. */
static void gather_unit(void *context, int unit, int thread) {
    (void)thread;
    const expert_job *job = context;
    routing *routed = &job->step->routed;
    const int first = unit * ROWS_PER_UNIT;
    for (int row = first; row < smallest(first + ROWS_PER_UNIT, routed->num_rows); row++)
        for (int i = row * job->layer->num_chosen; i < (row + 1) * job->layer->num_chosen; i++)
            if (choices_of(routed, routed->chosen[i]) > 1)
                copy_row(&job->step->input, routed->first_row + row, &routed->input, routed->places[i]);
}

static void multiply_unit(void *context, int number, int thread) {
    const expert_job *job = context;
    const pass *step = job->step;
    const routing *routed = &step->routed;
    const expert_unit *unit = &routed->units[number];
    const quire_expert *expert = &job->layer->experts[unit->expert];
    const int first = routed->first_choices[unit->expert], count = choices_of(routed, unit->expert);
    const int stride = job->is_down ? step->model->hidden_size : 2 * expert_size(job->layer);
    quire_input input = view_rows(&routed->input, first, count);
    if (!job->is_down && count == 1) input = view_rows(&step->input, routed->first_row + routed->rows[first], 1);
    multiply_range(step->run, job->is_down ? &expert->down : &expert->gate_up, &input, unit->first, unit->last,
                   quire_own_memory(step->engine, thread),
                   (job->is_down ? routed->outputs : routed->inner) + (size_t)first * (size_t)stride, stride);
}

static int num_panels(const expert_job *job) {
    if (job->is_down) return ceil_div(job->step->model->hidden_size, PANEL);
    return 2 * ceil_div(expert_size(job->layer), PANEL);
}

/* Divides the products of all chosen experts into units of similar work, so that all threads are busy until the end also
   if one row chose a few experts. An expert's work is reading its weights, and multiplying each of its rows. */
static void lay_units(const expert_job *job) {
    pass *step = job->step;
    routing *routed = &step->routed;
    const int at_once = step->run->at_once, panels = num_panels(job), pieces = ceil_div(panels, at_once);
    int64_t total = 0;
    for (int expert = 0; expert < job->layer->num_experts; expert++)
        if (choices_of(routed, expert)) total += 1 + choices_of(routed, expert);
    const int wanted = UNITS_PER_THREAD * quire_num_threads(step->engine);
    routed->num_units = 0;
    for (int expert = 0; expert < job->layer->num_experts; expert++) {
        const int count = choices_of(routed, expert);
        if (!count) continue;
        const int units = smallest((int)(((1 + count) * (int64_t)wanted + total - 1) / total), pieces);
        for (int i = 0; i < units; i++)
            routed->units[routed->num_units++] = (expert_unit){
                expert, at_once * (int)((int64_t)pieces * i / units),
                smallest(at_once * (int)((int64_t)pieces * (i + 1) / units), panels)};
    }
}

static void multiply_choices(expert_job *job, int is_down) {
    job->is_down = is_down;
    lay_units(job);
    quire_run(job->step->engine, multiply_unit, job, job->step->routed.num_units);
}

static int gated_per_unit(const expert_job *job) {
    return largest(1, smallest(num_choices(job) / (UNITS_PER_THREAD * quire_num_threads(job->step->engine)), 8));
}

static void gate_unit(void *context, int unit, int thread) {
    (void)thread;
    const expert_job *job = context;
    const int size = expert_size(job->layer), count = gated_per_unit(job), first = unit * count;
    routing *routed = &job->step->routed;
    for (int i = first; i < smallest(first + count, num_choices(job)); i++) {
        float *gate = routed->inner + (size_t)i * (size_t)(2 * size);
        job->step->run->gate(gate, gate + size, size, job->layer->activation);
        job->step->run->quantize(gate, size, &routed->input, i);
    }
}

static void sum_unit(void *context, int unit, int thread) {
    (void)thread;
    const expert_job *job = context;
    const pass *step = job->step;
    const routing *routed = &step->routed;
    const int num_chosen = job->layer->num_chosen, size = step->model->hidden_size, first = unit * ROWS_PER_UNIT;
    for (int row = first; row < smallest(first + ROWS_PER_UNIT, routed->num_rows); row++) {
        float *out = step->mixed + (size_t)(routed->first_row + row) * (size_t)size;
        memset(out, 0, (size_t)size * sizeof *out);
        for (int i = row * num_chosen; i < (row + 1) * num_chosen; i++) {
            const float *from = routed->outputs + (size_t)routed->places[i] * (size_t)size;
            const float weight = routed->weights[i];
            for (int j = 0; j < size; j++) out[j] += weight * from[j];
        }
    }
}

static void run_some(expert_job *job) {
    pass *step = job->step;
    routing *routed = &step->routed;
    const int units = ceil_div(routed->num_rows, ROWS_PER_UNIT);
    score_rows(job);
    quire_run(step->engine, choose_unit, job, units);
    sort_choices(job);
    set_input(&routed->input, num_choices(job), step->model->hidden_size, step->model->refine.gate_up);
    if (routed->num_rows > 1) quire_run(step->engine, gather_unit, job, units);
    multiply_choices(job, 0);
    set_input(&routed->input, num_choices(job), expert_size(job->layer), step->model->refine.down);
    quire_run(step->engine, gate_unit, job, ceil_div(num_choices(job), gated_per_unit(job)));
    multiply_choices(job, 1);
    quire_run(step->engine, sum_unit, job, units);
}

static void add_shared_unit(void *context, int unit, int thread) {
    (void)thread;
    const expert_job *job = context;
    const pass *step = job->step;
    const int size = step->model->hidden_size, first = unit * ROWS_PER_UNIT;
    for (int row = first; row < smallest(first + ROWS_PER_UNIT, step->batch->num_tokens); row++) {
        const size_t at = (size_t)row * (size_t)size;
        float gate;
        step->run->dot(job->layer->shared_gate, step->normed + at, (size_t)size, 1, size, &gate, 1);
        gate = 1 / (1 + expf(-gate));
        for (int i = 0; i < size; i++) step->mixed[at + (size_t)i] += gate * step->inner[at + (size_t)i];
    }
}

/* Adds the expert that all rows use to step->mixed. */
static void run_shared(expert_job *job) {
    pass *step = job->step;
    const quire_expert *shared = &job->layer->shared;
    project(step->engine, step->run, &shared->gate_up, &step->input, step->inner);
    gate_rows(step, job->layer->activation, step->inner, shared->down.parts[0].cols, step->model->refine.down);
    project(step->engine, step->run, &shared->down, &step->input, step->inner);
    quire_run(step->engine, add_shared_unit, job, ceil_div(step->batch->num_tokens, ROWS_PER_UNIT));
}

void run_experts(pass *step, const quire_layer *layer) {
    const int num_tokens = step->batch->num_tokens;
    expert_job job = {.step = step, .layer = layer};
    for (int first = 0; first < num_tokens; first += MAX_ROUTED) {
        step->routed.first_row = first;
        step->routed.num_rows = smallest(num_tokens - first, MAX_ROUTED);
        run_some(&job);
    }
    if (layer->shared_gate) run_shared(&job);
}

/* Norms the output of the MLP, and makes the inputs of the router and of the experts. */
static void divide_unit(void *context, int unit, int thread) {
    (void)thread;
    const expert_job *job = context;
    const pass *step = job->step;
    const quire_layer *layer = job->layer;
    const int size = step->model->hidden_size, first = unit * ROWS_PER_UNIT;
    const float eps = step->model->norm_eps;
    for (int row = first; row < smallest(first + ROWS_PER_UNIT, step->batch->num_tokens); row++) {
        const size_t at = (size_t)row * (size_t)size;
        step->run->norm(step->mixed + at, NULL, layer->post_dense_norm, size, eps, step->dense + at);
        step->run->norm(step->x + at, NULL, layer->router_norm, size, eps, step->scored + at);
        step->run->norm(step->x + at, NULL, layer->experts_norm, size, eps, step->normed + at);
        step->run->quantize(step->normed + at, size, &job->step->input, row);
    }
}

static void join_unit(void *context, int unit, int thread) {
    (void)thread;
    const expert_job *job = context;
    const pass *step = job->step;
    const int size = step->model->hidden_size, first = unit * ROWS_PER_UNIT;
    for (int row = first; row < smallest(first + ROWS_PER_UNIT, step->batch->num_tokens); row++) {
        float *out = step->mixed + (size_t)row * (size_t)size;
        step->run->norm(out, NULL, job->layer->post_experts_norm, size, step->model->norm_eps, out);
        step->run->add(out, step->dense + (size_t)row * (size_t)size, size);
    }
}

void run_parallel_experts(pass *step, const quire_layer *layer) {
    const int num_tokens = step->batch->num_tokens, units = ceil_div(num_tokens, ROWS_PER_UNIT);
    expert_job job = {.step = step, .layer = layer};
    set_input(&step->input, num_tokens, step->model->hidden_size, step->model->refine.gate_up);
    quire_run(step->engine, divide_unit, &job, units);
    run_experts(step, layer);
    quire_run(step->engine, join_unit, &job, units);
}

/* Lays out the memory for the layer that needs most of it. */
size_t lay_experts(pass *step, void *base) {
    const size_t rows = (size_t)smallest(step->batch->num_tokens, MAX_ROUTED);
    const size_t hidden = (size_t)step->model->hidden_size;
    int experts = 0, chosen = 0, size = 0;
    for (int index = 0; index < step->model->num_layers; index++) {
        const quire_layer *layer = &step->model->layers[index];
        if (!layer->num_experts) continue;
        experts = largest(experts, layer->num_experts);
        chosen = largest(chosen, layer->num_chosen);
        size = largest(size, expert_size(layer));
    }
    if (!experts) return 0;
    routing *routed = &step->routed;
    const size_t choices = rows * (size_t)chosen;
    const size_t units = (size_t)experts + (size_t)(UNITS_PER_THREAD * quire_num_threads(step->engine));
    size_t used = 0;
    carve(base, &used, rows * (size_t)experts * 4, (void **)&routed->scores);
    carve(base, &used, rows * (size_t)experts * 4, (void **)&routed->keys);
    carve(base, &used, choices * 4, (void **)&routed->chosen);
    carve(base, &used, choices * 4, (void **)&routed->weights);
    carve(base, &used, choices * 4, (void **)&routed->places);
    carve(base, &used, choices * 4, (void **)&routed->rows);
    carve(base, &used, (size_t)(experts + 2) * 4, (void **)&routed->first_choices);
    carve(base, &used, units * sizeof(expert_unit), (void **)&routed->units);
    carve(base, &used, choices * (size_t)(2 * size) * 4, (void **)&routed->inner);
    carve(base, &used, choices * hidden * 4, (void **)&routed->outputs);
    const int groups = ceil_div(largest(step->model->hidden_size, size), GROUP);
    quire_input input = {0};
    set_input(&input, (int)choices, groups * GROUP, most_refined(step->model));
    used += lay_input(&input, base ? (char *)base + used : NULL);
    if (base) routed->input = input;
    return used;
}
