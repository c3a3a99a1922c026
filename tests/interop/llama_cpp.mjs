// llama.cpp through node-llama-cpp: reads one request as JSON from standard input, answers in JSON on standard output.
//   {"package": "…/node_modules/node-llama-cpp", "model": "m.gguf", "texts": ["…"], "ids": [1, 2], "greedy": 200}
// texts are tokenised as they are; ids are evaluated, with the logits after each; greedy so many ids follow them.
import {readFileSync} from "node:fs";
import {pathToFileURL} from "node:url";

const request = JSON.parse(readFileSync(0, "utf8"));
const {getLlama, GgmlType} = await import(pathToFileURL(`${request.package}/dist/index.js`).href);
const llama = await getLlama({gpu: false, build: "never", skipDownload: true, logLevel: "error", maxThreads: 1});
const model = await llama.loadModel({modelPath: request.model, gpuLayers: 0});
const answer = {
    bos: model.tokens.bos,
    eos: model.tokens.eos,
    addsBos: model.tokens.shouldPrependBosToken,
    texts: (request.texts ?? []).map((text) => Array.from(model.tokenize(text, true)))
};
if (request.ids) {
    const context = await model.createContext({
        contextSize: request.ids.length + (request.greedy ?? 0) + 8,
        // f16, the usual, would be the largest difference by far
        experimentalKvCacheKeyType: GgmlType.F32, experimentalKvCacheValueType: GgmlType.F32, flashAttention: false
    });
    const sequence = context.getSequence();
    if (request.greedy) {
        answer.greedy = [];
        for await (const id of sequence.evaluate(request.ids, {temperature: 0, yieldEogToken: true})) {
            answer.greedy.push(id);
            if (answer.greedy.length === request.greedy) break;
        }
        answer.text = model.detokenize(answer.greedy, false, request.ids);
    } else {
        const steps = request.ids.map((id) => [id, {generateNext: {logits: true}}]);
        const outputs = await sequence.controlledEvaluate(steps);
        answer.logits = outputs.map(({next}) => {
            const row = [];
            for (const [id, logit] of next.logits) row[id] = logit;
            return row;
        });
    }
}
process.stdout.write(JSON.stringify(answer), () => process.exit(0));
