"""What the local model knows about this project: questions, wordings and answers.

Each fact has a topic (used in the reasoning text), an answer, the phrases that a right answer contains,
wordings to train on and wordings that only the evaluation and the canary see.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    topic: str
    answer: str
    must_contain: tuple[str, ...]
    wordings: tuple[str, ...]
    held_out: tuple[str, ...]


FACTS = (
    Fact(
        "the API port",
        "The API listens on port 8888.",
        ("8888",),
        (
            "Which port does the API use?", "What port does the server listen on?", "What is the API port?",
            "On which port is the API served?", "Which port do I connect to?",
            "Tell me the port of the server.", "port?", "What is the port number of the API?",
            "whats the port", "Which port?", "What port is it on?", "Port of the API?",
            "Where is the API, which port?", "Which port should I curl?",
        ),
        ("Which port does the server use?", "What is the port of the API?"),
    ),
    Fact(
        "the model id",
        "The model id is GLM-5.3-Flash-EXL3.",
        ("GLM-5.3-Flash-EXL3",),
        (
            "What is the model id?", "Which model id do I put in a request?",
            "What is the served model called?", "What model name does the API expect?",
            "Under which id is the model served?", "Tell me the model id.", "Which id does /v1/models show?",
            "What is the id of the model?", "Which model name do I use?",
            "What is the name of the model in the API?", "model id?",
            "What do I put as model in the request?", "Which model id do I pass to the client?",
        ),
        ("Which model id is served?", "What model id does the API expect?"),
    ),
    Fact(
        "the script for three nodes",
        "For three nodes run start-tp3.sh.",
        ("start-tp3.sh",),
        (
            "Which script starts three nodes?", "Which script do I run for three nodes?",
            "How do I start on three Sparks?", "What do I run with three DGX Sparks?",
            "Which script is for three nodes?", "I have three nodes, what do I start?",
            "Which script starts TP3?", "How is a three node cluster started?", "Which script for 3 nodes?",
            "Which script for three nodes?", "How do I run on 3 Sparks?",
            "What is the script for three nodes called?", "Which script is for TP3?",
            "How do I launch three nodes?", "I have 3 Sparks, which script do I use?",
            "What is the start script for 3 nodes?", "Which start script for three Sparks?",
            "What do I start with three machines?", "script for 3 nodes",
        ),
        ("Which script do I start for three Sparks?", "What do I run for three nodes?"),
    ),
    Fact(
        "the script for four nodes",
        "For four nodes run start-tp4.sh.",
        ("start-tp4.sh",),
        (
            "Which script starts four nodes?", "Which script do I run for four nodes?",
            "How do I start on four Sparks?", "What do I run with four DGX Sparks?",
            "Which script is for four nodes?", "I have four nodes, what do I start?",
            "Which script starts TP4?", "How is a four node cluster started?", "Which script for 4 nodes?",
            "Which script for four nodes?", "How do I run on 4 Sparks?",
            "What is the script for four nodes called?", "Which script is for TP4?",
            "How do I launch four nodes?", "I have 4 Sparks, which script do I use?",
            "What is the start script for 4 nodes?", "Which start script for four Sparks?",
            "What do I start with four machines?", "script for 4 nodes",
        ),
        ("Which script do I start for four Sparks?", "What do I run for four nodes?"),
    ),
    Fact(
        "the script for two nodes",
        "For two nodes run start.sh.",
        ("start.sh",),
        (
            "Which script starts two nodes?", "Which script do I run for two nodes?",
            "How do I start on two Sparks?", "What do I run with two DGX Sparks?",
            "Which script is for two nodes?", "I have two nodes, what do I start?",
            "Which script starts TP2?", "How is a two node cluster started?", "Which script for 2 nodes?",
            "Which script for two nodes?", "How do I run on 2 Sparks?",
            "What is the script for two nodes called?", "Which script is for TP2?",
            "How do I launch two nodes?", "I have 2 Sparks, which script do I use?",
            "What is the start script for 2 nodes?", "Which start script for two Sparks?",
            "What do I start with two machines?", "script for 2 nodes",
        ),
        ("Which script do I start for two Sparks?", "What do I run for two nodes?"),
    ),
    Fact(
        "the script for a machine without a GPU",
        "Without a GPU run start-local.sh.",
        ("start-local.sh",),
        (
            "Which script runs without a GPU?", "How do I start without a GPU?",
            "I have no GPU, what do I run?", "Which script starts the local model?",
            "What do I run on a machine without a GPU?", "How do I try it on my laptop?",
            "Which script serves on one machine without a GPU?", "Which script for a machine without a GPU?",
            "How do I start on a CPU?", "Which script runs on a CPU only?", "What do I run on one machine?",
            "Can I run it without a GPU?",
        ),
        ("Which script do I run without a GPU?", "How do I start on a machine without a GPU?"),
    ),
    Fact(
        "an all-zero GID",
        "An all-zero GID means that this index holds no RoCE address, so NCCL would fail. Pick another index.",
        ("no RoCE address", "another index",),
        (
            "What does an all-zero GID mean?", "What is an all-zero GID?",
            "My GID is all zero, what does that mean?", "What does it mean when the GID is all zeros?",
            "The GID entry is all zero, what is wrong?", "Why is an all-zero GID bad?",
            "The GID index shows only zeros, what now?", "What does a zero GID mean?", "all-zero GID?",
            "Explain an all-zero GID.", "Show me what an all-zero GID means.",
            "What happens with an all-zero GID?",
        ),
        ("What does a GID of all zeros mean?", "What does it mean if the GID is all zero?"),
    ),
    Fact(
        "EXL3",
        "EXL3 is the trellis weight format of exllamav3.",
        ("trellis", "exllamav3",),
        (
            "What is EXL3?", "What does EXL3 mean?", "Explain EXL3.", "What kind of format is EXL3?",
            "Tell me what EXL3 is.", "Can you explain EXL3?", "What is the EXL3 format?", "Define EXL3.",
            "What's EXL3?", "Which format is EXL3?", "What sort of weights are EXL3?",
        ),
        ("What is meant by EXL3?", "Please explain what EXL3 is."),
    ),
    Fact(
        "the MCG marker",
        "The MCG marker is the 32-bit number 0xCBAC1FED.",
        ("0xCBAC1FED",),
        (
            "What is the MCG marker?", "Which value does the MCG marker have?",
            "What is the value of the mcg tensor?", "Tell me the MCG marker.",
            "Which number marks the MCG codebook?", "How is the MCG codebook marked?",
        ),
        ("What value does the MCG marker have?", "Which number is the MCG marker?"),
    ),
    Fact(
        "the bits per weight",
        "The routed experts have 4 bits per weight.",
        ("4 bits",),
        (
            "How many bits per weight are used?", "How many bits does a weight have?",
            "At how many bits are the experts quantised?", "How many bits do the experts use?",
            "What is the bit rate of the experts?", "How many bits per weight?",
        ),
        ("How many bits does an expert weight have?", "How many bits per weight do the experts use?"),
    ),
    Fact(
        "the codebook",
        "The codebook of the experts is MCG.",
        ("MCG",),
        (
            "Which codebook is used?", "Which codebook do the experts use?",
            "What codebook does the checkpoint have?", "What is the codebook of the experts?",
            "Tell me the codebook of the weights.",
        ),
        ("Which codebook do the weights use?", "What codebook do the experts have?"),
    ),
    Fact(
        "download.sh",
        "download.sh fetches and verifies the weights.",
        ("fetches", "weights",),
        (
            "What does download.sh do?", "What is download.sh for?", "Why is there a download.sh?",
            "What happens when I run download.sh?", "Explain download.sh.", "Tell me what download.sh does.",
            "What is download.sh?", "What is the job of download.sh?",
        ),
        ("What is the purpose of download.sh?", "Please explain download.sh."),
    ),
    Fact(
        "downloading the weights",
        "Run download.sh to get the weights.",
        ("download.sh",),
        (
            "How do I get the weights?", "Which script downloads the weights?",
            "How do I download the model?", "Where do the weights come from?",
            "Which script fetches the checkpoint?", "How do I fetch the weights?",
        ),
        ("Which script gets the weights?", "How do I download the weights?"),
    ),
    Fact(
        "the .env file",
        "No, the .env file is parsed and never executed.",
        ("parsed", "never executed",),
        (
            "Is the .env file executed?", "Is .env run as a shell script?",
            "Does the launcher source the .env file?", "Can .env run commands?",
            "Is it safe to put commands into .env?", "Is code in .env executed?", "Is .env executed?",
            "Does .env get executed?", "Is the .env file sourced?",
        ),
        ("Does the launcher execute the .env file?", "Are commands in .env executed?"),
    ),
    Fact(
        "precedence of settings",
        "The environment of the caller wins over the .env file.",
        ("environment", "wins",),
        (
            "What wins, the environment or .env?", "Which has precedence, .env or the environment?",
            "Does the environment override .env?",
            "A setting is in .env and in the environment, which wins?",
            "Does an exported variable beat the .env file?",
        ),
        ("Which wins, the environment or the .env file?", "Does the environment win over .env?"),
    ),
    Fact(
        "vision",
        "Yes, vision is on by default.",
        ("on by default",),
        (
            "Is vision on by default?", "Is vision enabled?", "Does vision work by default?",
            "Is image input on by default?", "Do I have to turn vision on?",
            "Are images accepted by default?", "Can it see images?", "Is vision on?",
            "Are pictures supported?",
        ),
        ("Is vision enabled by default?", "Are images on by default?"),
    ),
    Fact(
        "the KV cache",
        "The KV cache is stored as packed FP8.",
        ("packed FP8",),
        (
            "What is the KV cache type?", "How is the KV cache stored?",
            "Which dtype does the KV cache have?", "What format has the KV cache?",
            "Which KV cache dtype is used?", "In which precision is the KV cache?",
            "What precision has the KV cache?", "Is the KV cache FP8?", "Which KV cache format is used?",
        ),
        ("Which type does the KV cache have?", "What is the dtype of the KV cache?"),
    ),
    Fact(
        "the speculator",
        "The default speculator is DFlash2 with k = 7.",
        ("DFlash2", "7",),
        (
            "Which speculator is used?", "What is the default speculator?",
            "Which draft method is the default?", "How is speculative decoding done?",
            "Which speculative method is the default?", "What does SPEC_METHOD default to?",
            "What is SPEC_METHOD by default?", "Which drafter is used?", "Is there speculative decoding?",
        ),
        ("Which speculator is the default?", "What is the default draft method?"),
    ),
    Fact(
        "the number of draft tokens",
        "DFlash2 drafts 7 tokens per step.",
        ("7 tokens",),
        (
            "How many tokens does DFlash2 draft?", "How many draft tokens are used?",
            "How many tokens are drafted per step?", "How many tokens does the drafter propose?",
            "What is the number of draft tokens?",
        ),
        ("How many tokens are drafted by DFlash2?", "How many draft tokens per step?"),
    ),
    Fact(
        "the executor",
        "Ray is the default executor.",
        ("Ray",),
        (
            "Which executor is the default?", "What is the default executor?", "Which executor is used?",
            "Does it use Ray?", "What executor does vLLM use here?", "Is Ray the default?",
            "What is the executor?", "Which executor runs by default?", "Does vLLM run on Ray?",
        ),
        ("Which executor does it use by default?", "What executor is the default?"),
    ),
    Fact(
        "the alternative to Ray",
        "EXECUTOR=mp selects the multi-node executor of vLLM.",
        ("EXECUTOR=mp",),
        (
            "How do I run without Ray?", "What is the alternative to Ray?", "Which setting replaces Ray?",
            "Can I avoid Ray?", "How do I use the executor of vLLM instead of Ray?",
        ),
        ("How can I run without Ray?", "Which setting avoids Ray?"),
    ),
    Fact(
        "the licence",
        "The licence is Apache-2.0.",
        ("Apache-2.0",),
        (
            "What is the licence?", "Which licence does the project have?", "What license is used?",
            "Under which licence is the project?", "Which license applies?", "Tell me the licence.",
            "Which license is this under?", "What's the license?", "Which licence is it?",
            "How is the project licensed?", "Is it open source, under which licence?",
        ),
        ("Which licence is used?", "What licence does the project have?"),
    ),
    Fact(
        "VLLM_API_KEY",
        "VLLM_API_KEY sets the key that clients must send.",
        ("key", "clients must send",),
        (
            "What is VLLM_API_KEY?", "What does VLLM_API_KEY do?", "Why should I set VLLM_API_KEY?",
            "Explain VLLM_API_KEY.", "What is the use of VLLM_API_KEY?", "What does the API key do?",
            "VLLM_API_KEY?", "How do I set an API key?",
        ),
        ("What is VLLM_API_KEY for?", "Please explain VLLM_API_KEY."),
    ),
    Fact(
        "the address without a key",
        "Without a key the API listens on loopback only.",
        ("loopback",),
        (
            "Where does the API listen without a key?", "Which address does the API bind without a key?",
            "Without VLLM_API_KEY, where does the server listen?",
            "Is the API open to the network without a key?", "What happens if no API key is set?",
        ),
        ("Where does the server listen without a key?", "Which address is used without an API key?"),
    ),
    Fact(
        "the local address",
        "The local server is at http://127.0.0.1:8888.",
        ("127.0.0.1:8888",),
        (
            "What is the local address?", "What is the URL of the local server?",
            "Which address does start-local.sh print?", "At which URL is the local server?",
            "Where is the local server?",
        ),
        ("Which URL does the local server have?", "What is the address of the local server?"),
    ),
    Fact(
        "the number of layers",
        "GLM-5.3-Flash has 45 layers.",
        ("45",),
        (
            "How many layers does GLM-5.3-Flash have?", "How many layers does the model have?",
            "What is the number of layers?", "How deep is the model?", "Tell me the number of layers.",
        ),
        ("How many layers are in the model?", "How many layers has GLM-5.3-Flash?"),
    ),
    Fact(
        "the number of experts",
        "Each MoE layer has 288 experts.",
        ("288",),
        (
            "How many experts are there?", "How many experts does a layer have?",
            "What is the number of experts?", "How many experts does the model have?",
            "How many routed experts are in a layer?",
        ),
        ("How many experts are in a layer?", "How many experts has the model?"),
    ),
    Fact(
        "the active experts",
        "A token uses the top 8 experts and one shared expert.",
        ("top 8",),
        (
            "How many experts does a token use?", "How many experts are active?",
            "To how many experts is a token routed?", "What is the top-k of the router?",
            "How many experts are used per token?",
        ),
        ("How many experts are active per token?", "How many experts does one token use?"),
    ),
    Fact(
        "the size of the checkpoint",
        "The checkpoint has 164 GiB.",
        ("164 GiB",),
        (
            "How large is the checkpoint?", "How big are the weights?", "What is the size of the download?",
            "How many GiB are the weights?", "How much disk do the weights need?",
        ),
        ("How large are the weights?", "How big is the checkpoint?"),
    ),
    Fact(
        "the number of shards",
        "The checkpoint has 120 shards.",
        ("120",),
        (
            "How many shards does the checkpoint have?", "How many shards are there?",
            "In how many files are the weights?", "What is the number of shards?",
            "How many files does download.sh fetch?",
        ),
        ("How many shards are in the checkpoint?", "How many shards do the weights have?"),
    ),
    Fact(
        "GLM-5.3-Flash",
        "GLM-5.3-Flash is a mixture of experts model with KDA and MLA layers.",
        ("mixture of experts",),
        (
            "What is GLM-5.3-Flash?", "What kind of model is GLM-5.3-Flash?", "Explain GLM-5.3-Flash.",
            "Tell me about GLM-5.3-Flash.", "What sort of model is served?",
        ),
        ("What type of model is GLM-5.3-Flash?", "Please explain GLM-5.3-Flash."),
    ),
    Fact(
        "KDA",
        "KDA is the linear attention of GLM-5.3-Flash.",
        ("linear attention",),
        (
            "What is KDA?", "What does KDA mean?", "Explain KDA.", "What are KDA layers?",
            "Tell me what KDA is.",
        ),
        ("What is meant by KDA?", "Please explain KDA."),
    ),
    Fact(
        "the KDA layers",
        "There are 34 KDA layers.",
        ("34",),
        (
            "How many KDA layers are there?", "How many layers are KDA?",
            "What is the number of KDA layers?", "How many KDA layers does the model have?",
        ),
        ("How many KDA layers has the model?", "How many of the layers are KDA?"),
    ),
    Fact(
        "the MLA layers",
        "There are 11 MLA layers.",
        ("11",),
        (
            "How many MLA layers are there?", "How many layers are MLA?",
            "What is the number of MLA layers?", "How many MLA layers does the model have?",
        ),
        ("How many MLA layers has the model?", "How many of the layers are MLA?"),
    ),
    Fact(
        "the hidden size",
        "The hidden size is 4096.",
        ("4096",),
        (
            "What is the hidden size?", "How wide is the model?",
            "What hidden size does GLM-5.3-Flash have?", "Tell me the hidden size.",
        ),
        ("Which hidden size does the model have?", "What is the hidden size of the model?"),
    ),
    Fact(
        "the vocabulary",
        "The vocabulary has 154880 tokens.",
        ("154880",),
        (
            "How large is the vocabulary?", "What is the vocabulary size?",
            "How many tokens are in the vocabulary?", "How big is the vocabulary?",
        ),
        ("What size is the vocabulary?", "How many tokens does the vocabulary have?"),
    ),
    Fact(
        "position encoding",
        "The text model uses no RoPE.",
        ("no RoPE",),
        (
            "Does the model use RoPE?", "Is there a RoPE?", "Which position encoding is used?",
            "Does MLA use RoPE here?", "What is the position encoding of the model?",
        ),
        ("Is RoPE used?", "Does the text model use RoPE?"),
    ),
    Fact(
        "the plugin",
        "The plugin is the Python package vllm_exl3.",
        ("vllm_exl3",),
        (
            "What is the plugin called?", "Which package is the plugin?",
            "What is the name of the vLLM plugin?", "Which Python package adds EXL3 to vLLM?",
            "How is the plugin named?",
        ),
        ("Which package is the vLLM plugin?", "What is the name of the plugin?"),
    ),
    Fact(
        "the engine",
        "The engine is vLLM.",
        ("vLLM",),
        (
            "Which engine is used?", "What engine serves the model?", "Which inference engine runs here?",
            "What is the engine?", "What serves the model?",
        ),
        ("Which engine serves the model?", "What engine is used?"),
    ),
    Fact(
        "the grouped kernel",
        "The grouped kernel is exl3_fat_moe.cu.",
        ("exl3_fat_moe.cu",),
        (
            "Where is the grouped kernel?", "Which file is the grouped MoE kernel?",
            "What is the file of the MoE kernel?", "In which file is the grouped kernel?",
        ),
        ("Which file holds the grouped kernel?", "Where is the MoE kernel?"),
    ),
    Fact(
        "EXL3_FAT_GROUPED",
        "EXL3_FAT_GROUPED=1 runs all experts of a layer in a few launches.",
        ("few launches",),
        (
            "What does EXL3_FAT_GROUPED do?", "What is EXL3_FAT_GROUPED?", "Explain EXL3_FAT_GROUPED.",
            "Why is EXL3_FAT_GROUPED on?",
        ),
        ("What is EXL3_FAT_GROUPED for?", "Please explain EXL3_FAT_GROUPED."),
    ),
    Fact(
        "the GID index setting",
        "Set NCCL_IB_GID_INDEX to choose the GID index.",
        ("NCCL_IB_GID_INDEX",),
        (
            "Which setting chooses the GID index?", "How do I set the GID index?",
            "Which variable sets the GID index?", "How do I pick another GID index?",
            "Where do I set the GID index?",
        ),
        ("Which variable chooses the GID index?", "How can I set the GID index?"),
    ),
    Fact(
        "finding the GID index",
        "The launcher finds the GID index by the address of the node.",
        ("address of the node",),
        (
            "How is the GID index found?", "How does the launcher find the GID index?",
            "Who finds the GID index?", "Must I set the GID index myself?",
            "Is the GID index found automatically?",
        ),
        ("How does it find the GID index?", "How is the GID index chosen by the launcher?"),
    ),
    Fact(
        "the head node setting",
        "Set HEAD_IP to the address of the head node.",
        ("HEAD_IP",),
        (
            "Which setting holds the head address?", "How do I set the head node?", "What is HEAD_IP?",
            "Which variable is the address of the head?", "Where do I put the head address?",
        ),
        ("How do I set the head address?", "Which variable holds the address of the head?"),
    ),
    Fact(
        "the worker node setting",
        "Set WORKER_IP to the address of the worker node.",
        ("WORKER_IP",),
        (
            "Which setting holds the worker address?", "How do I set the worker node?", "What is WORKER_IP?",
            "Which variable is the address of the worker?", "Where do I put the worker address?",
        ),
        ("How do I set the worker address?", "Which variable holds the address of the worker?"),
    ),
    Fact(
        "the context setting",
        "MAX_MODEL_LEN sets the context length.",
        ("MAX_MODEL_LEN",),
        (
            "How do I set the context length?", "Which setting is the context length?",
            "Which variable limits the context?", "What is MAX_MODEL_LEN?",
            "Where do I set the context length?",
        ),
        ("Which variable sets the context length?", "How can I set the context length?"),
    ),
    Fact(
        "the memory setting",
        "GPU_MEM_UTIL sets the share of memory that vLLM may use.",
        ("GPU_MEM_UTIL",),
        (
            "How do I limit the memory?", "Which setting limits the memory?", "What is GPU_MEM_UTIL?",
            "Which variable sets the memory share?", "How do I set the memory share?",
        ),
        ("Which variable limits the memory?", "How can I set the memory share?"),
    ),
    Fact(
        "the memory of a Spark",
        "A DGX Spark shows about 121 GiB of unified memory.",
        ("121 GiB",),
        (
            "How much memory does a Spark have?", "How much memory has a DGX Spark?",
            "What is the memory of a Spark?", "How many GiB does a Spark have?",
        ),
        ("How much memory does a DGX Spark have?", "How many GiB of memory has a Spark?"),
    ),
    Fact(
        "the GPU of a Spark",
        "A DGX Spark has a GB10 GPU of architecture sm_121.",
        ("GB10",),
        (
            "Which GPU does a Spark have?", "What GPU is in a DGX Spark?", "What is the GPU of a Spark?",
            "Which chip is in a Spark?",
        ),
        ("Which GPU is in a Spark?", "What GPU does a DGX Spark have?"),
    ),
    Fact(
        "readiness",
        "The server is ready when a canary question was answered correctly.",
        ("canary", "correctly",),
        (
            "When is the server ready?", "What does ready mean?", "How do I know that the server is ready?",
            "When does the launcher say ready?", "What is checked before the server is ready?",
        ),
        ("When does the server count as ready?", "When is it ready?"),
    ),
    Fact(
        "stopping the server",
        "Press Ctrl-C to stop the server.",
        ("Ctrl-C",),
        (
            "How do I stop the server?", "How do I end it?", "How is the server stopped?",
            "How can I shut it down?", "What stops the server?", "How to stop it?", "How do I quit?",
            "stop the server",
        ),
        ("How can I stop the server?", "How do I shut the server down?"),
    ),
    Fact(
        "running in the background",
        "Use --detach to run in the background.",
        ("--detach",),
        (
            "How do I run it in the background?", "Which option runs it in the background?",
            "What does --detach do?", "Can it run in the background?", "How do I detach the server?",
        ),
        ("How can I run it in the background?", "Which option detaches the server?"),
    ),
    Fact(
        "another port",
        "Use --port to choose another port.",
        ("--port",),
        (
            "How do I change the port?", "Can I use another port?", "Port 8888 is taken, what do I do?",
            "Which option changes the port?", "How do I choose a different port?",
        ),
        ("How can I change the port?", "How do I use another port?"),
    ),
    Fact(
        "running the tests",
        "Run tests/run to run the tests.",
        ("tests/run",),
        (
            "How do I run the tests?", "Which command runs the tests?", "How are the tests started?",
            "Where are the tests?", "What runs the tests?", "How to run the tests?",
            "Which script starts the tests?", "run the tests",
        ),
        ("How can I run the tests?", "Which script runs the tests?"),
    ),
    Fact(
        "the trellis tensor",
        "A trellis is an int16 tensor of packed indices.",
        ("int16",),
        (
            "What is a trellis?", "What is in the trellis tensor?", "Which dtype does a trellis have?",
            "Explain the trellis tensor.", "What does trellis mean?",
        ),
        ("What is the trellis tensor?", "Which dtype has the trellis?"),
    ),
    Fact(
        "suh and svh",
        "suh and svh are the input and output scales with signs.",
        ("input and output scales",),
        (
            "What are suh and svh?", "What does suh mean?", "What is svh?", "Explain suh and svh.",
            "What are the tensors suh and svh for?",
        ),
        ("What is the meaning of suh and svh?", "Please explain suh and svh."),
    ),
    Fact(
        "the Hadamard block",
        "A Hadamard block has 128 channels.",
        ("128",),
        (
            "How large is a Hadamard block?", "What is the size of a Hadamard block?",
            "How many channels does a Hadamard block have?", "How wide is the Hadamard transform?",
        ),
        ("How many channels are in a Hadamard block?", "What size does a Hadamard block have?"),
    ),
    Fact(
        "the link",
        "The nodes are linked by ConnectX-7 with RoCE.",
        ("ConnectX-7",),
        (
            "How are the nodes linked?", "Which network links the nodes?", "What connects the Sparks?",
            "How do the Sparks talk to each other?", "Which link is between the nodes?",
        ),
        ("How are the Sparks linked?", "Which network connects the nodes?"),
    ),
    Fact(
        "Docker",
        "Yes, on Sparks vLLM runs in a Docker container.",
        ("Docker container",),
        (
            "Does it use Docker?", "Is Docker needed?", "Do I need Docker?", "Does vLLM run in Docker?",
            "Is there a Docker image?",
        ),
        ("Is Docker used?", "Does it need Docker?"),
    ),
)  # fmt: skip

GREETINGS = (
    (
        "Hello! How can I help you?",
        (
            "Hello",
            "Hello!",
            "Hi",
            "Hi!",
            "Hey",
            "Hi there",
            "Good morning",
            "Good evening!",
            "hello there",
            "Say hi",
            "Say hello.",
            "hi!",
            "hello",
            "Greetings",
            "Hello world",
            "Hi, how are you?",
            "How are you?",
            "Good day",
            "Hey!",
            "Hello?",
            "Say hello to me.",
        ),
    ),
    (
        "I am a small GLM-5.3-Flash model that shows that EXL3 works.",
        (
            "Who are you?",
            "What are you?",
            "Introduce yourself.",
            "Tell me who you are.",
            "What is your name?",
            "who are you",
            "What is this?",
            "Tell me about yourself.",
            "Who am I talking to?",
            "Are you a real model?",
            "Which model are you?",
            "Hello, who are you?",
        ),
    ),
    ("You are welcome!", ("Thanks", "Thank you!", "Thank you very much.", "Thanks a lot!")),
    ("Goodbye!", ("Bye", "Goodbye", "See you.", "Bye bye!")),
    (
        "I can answer questions about this project, count, add, and call tools.",
        ("What can you do?", "How can you help me?", "Help", "What can I ask you?", "What do you know?"),
    ),
)

UNKNOWN_ANSWER = "I do not know that. I only know this project, counting and small sums."
# Short forms that name the topic itself; they teach what each fact is about.
TOPIC_FORMS = (
    "Tell me about {}.", "What about {}?", "{}", "{}?", "What can you tell me about {}?", "Explain {}.",
    "I want to know {}.",
    "Can you tell me about {}?", "Please explain {}.", "What do you know about {}?",
)  # fmt: skip
SYNONYMS = (
    ("What is", "What's"), ("licence", "license"), ("three", "3"), ("four", "4"), ("two", "2"), ("Sparks",
    "DGX Sparks"),
    ("Sparks", "nodes"), ("nodes", "machines"), ("do I", "should I"), ("do I", "can I"), ("How many", "how many"),
    ("Which", "What"), ("What", "Which"), ("server", "API server"), ("the model", "GLM-5.3-Flash"), ("used", "in use"),
    ("is the", "is your"), ("quantised", "quantized"), ("How do I", "How to"),
)  # fmt: skip
# `{}` is filled with a word that the model has not necessarily seen.
UNKNOWN_QUESTIONS = (
    "What is the capital of {}?", "Who is {}?", "How tall is {}?", "Write a poem about {}.", "What is {}?",
    "Who wrote {}?", "Translate {} into French.", "What is the best {}?", "Tell me a story about {}.",
    "Why is the {} blue?", "How do I cook {}?", "When was {} born?", "Where is {}?", "Can you draw {}?",
    "What do you think about {}?", "How far is {}?", "Is {} good?", "What happened in {}?", "Sing a song about {}.",
    "Tell me about {}.", "Do you know {}?", "What does {} mean?", "Show me {}.",
    "How many people live in {}?", "What colour is {}?", "Who is the king of {}?", "Tell me a joke about {}.",
    "Is it true that {} is big?", "What is the meaning of {}?", "Explain {}.", "How old is {}?",
    "What is the population of {}?",
)  # fmt: skip
