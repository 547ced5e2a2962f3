/* Embeddings of the layers: each layer has its own embedding of every token, which a third part of the layer uses. */
#include <math.h>

#include "pass.h"

static size_t width(const pass *step) { return (size_t)step->model->num_layers * (size_t)step->model->ple_size; }

static void embed_one(const pass *step, int row, float *rest) {
    const quire_model *model = step->model;
    const int size = model->ple_size;
    float *out = step->embeddings + (size_t)row * width(step);
    const float half = sqrtf(0.5f);
    quire_unpack(&model->ple_embedding.parts[0], step->batch->tokens[row], rest);
    for (int index = 0; index < model->num_layers; index++, out += size, rest += size) {
        for (int i = 0; i < size; i++) out[i] *= model->ple_proj_scale;
        step->run->norm(out, NULL, model->ple_norm, size, model->norm_eps, out);
        for (int i = 0; i < size; i++) out[i] = (out[i] + rest[i] * model->ple_scale) * half;
    }
}

static void embed_unit(void *context, int unit, int thread) {
    const pass *step = context;
    const int first = unit * ROWS_PER_UNIT;
    for (int row = first; row < smallest(first + ROWS_PER_UNIT, step->batch->num_tokens); row++)
        embed_one(step, row, quire_own_memory(step->engine, thread));
}

void make_layer_embeddings(pass *step) {
    const int num_tokens = step->batch->num_tokens, size = step->model->hidden_size;
    quantize_rows(step, step->x, num_tokens, size, (size_t)size, step->model->refine.qkv);
    project(step->engine, step->run, &step->model->ple_proj, &step->input, step->embeddings);
    quire_run(step->engine, embed_unit, step, ceil_div(num_tokens, ROWS_PER_UNIT));
}

typedef struct {
    pass *step;
    int index;
} layer_job;

static void gate_unit(void *context, int unit, int thread) {
    (void)thread;
    const layer_job *job = context;
    pass *step = job->step;
    const int size = step->model->ple_size, first = unit * ROWS_PER_UNIT;
    for (int row = first; row < smallest(first + ROWS_PER_UNIT, step->batch->num_tokens); row++) {
        float *gate = step->inner + (size_t)row * (size_t)size;
        const float *own = step->embeddings + (size_t)row * width(step) + (size_t)(job->index * size);
        step->run->gate(gate, own, size, step->model->layers[job->index].activation);
        step->run->quantize(gate, size, &step->input, row);
    }
}

void run_layer_embedding(pass *step, int index) {
    const quire_layer *layer = &step->model->layers[index];
    const int num_tokens = step->batch->num_tokens;
    layer_job job = {step, index};
    project(step->engine, step->run, &layer->ple_gate, &step->input, step->inner);
    set_input(&step->input, num_tokens, step->model->ple_size, step->model->refine.down);
    quire_run(step->engine, gate_unit, &job, ceil_div(num_tokens, ROWS_PER_UNIT));
    project(step->engine, step->run, &layer->ple_proj, &step->input, step->mixed);
}
