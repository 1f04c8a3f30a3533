// Fine-tunes a model to say one sequence by heart, from Go, over gRPC: only proto/ and a key.
//
// TINSMITH_STATE names a file in which a run leaves its session and model until it is done. Started again with
// it, a run that was killed goes on after its last request.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"math"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/tinsmith/tinsmith/gen/go/tinsmith/v1"
)

const (
	steps  = 6
	length = 24
)

// state is what a later run needs to go on.
type state struct {
	Session string `json:"session"`
	Model   string `json:"model"`
}

// service makes calls with the key, a deadline and repetition: every call may be repeated.
type service struct {
	pb.TinsmithServiceClient
	key string
}

func (s *service) context(seconds time.Duration) (context.Context, context.CancelFunc) {
	ctx := metadata.AppendToOutgoingContext(context.Background(), "x-api-key", s.key)
	return context.WithTimeout(ctx, seconds*time.Second)
}

// again makes a call until it succeeds, or fails in a way that repeating does not mend.
func (s *service) again(call func(ctx context.Context) error) error {
	for attempt := 1; ; attempt++ {
		ctx, cancel := s.context(90)
		err := call(ctx)
		cancel()
		if err == nil || attempt == 8 {
			return err
		}
		pause, passes := wait(err, attempt)
		if !passes {
			return err
		}
		time.Sleep(pause)
	}
}

// wait says whether a failed call may succeed later, and after how long.
func wait(err error, attempt int) (time.Duration, bool) {
	failed := status.Convert(err)
	for _, detail := range failed.Details() {
		if retry, is := detail.(*errdetails.RetryInfo); is {
			delay := retry.GetRetryDelay()
			return time.Duration(delay.GetSeconds())*time.Second + time.Duration(delay.GetNanos()), true
		}
	}
	pause := 250 * time.Millisecond << attempt
	return pause, failed.Code() == codes.Unavailable || failed.Code() == codes.DeadlineExceeded
}

// result waits for what a request comes to. It comes in pieces, so it may be larger than any message.
func (s *service) result(request string) (*pb.OperationResult, error) {
	found := &pb.OperationResult{}
	for {
		var data []byte
		whole := false
		err := s.again(func(ctx context.Context) error {
			data, whole = nil, false
			read, err := s.ReadResults(ctx, &pb.ReadResultsRequest{RequestIds: []string{request}})
			for err == nil {
				var answer *pb.ReadResultsResponse
				if answer, err = read.Recv(); err == nil {
					if answer.GetError() != nil {
						return errors.New(answer.GetError().Message)
					}
					data = append(data, answer.GetPiece().Data...)
					whole = int64(len(data)) == answer.GetPiece().TotalBytes
				}
			}
			if err == io.EOF {
				return nil
			}
			return err
		})
		if err != nil {
			return nil, err
		}
		if whole {
			if err := proto.Unmarshal(data, found); err != nil {
				return nil, err
			}
			if found.GetError() != nil {
				return nil, fmt.Errorf("%s: %s", request, found.GetError().Message)
			}
			return found, nil
		}
		s.sayWhy(request)
	}
}

// sayWhy prints why the work does not go on at present, if it does not.
func (s *service) sayWhy(request string) {
	ctx, cancel := s.context(10)
	defer cancel()
	now := 0.0
	answer, err := s.GetResult(ctx, &pb.GetResultRequest{RequestId: request, TimeoutSeconds: &now})
	if err == nil && answer.WaitingFor != "" {
		fmt.Println(answer.WaitingFor)
	}
}

// tensor has little-endian bytes of numbers of one type.
func tensor(dtype pb.DataType, count int, numbers interface{}) *pb.Tensor {
	var data bytes.Buffer
	check(binary.Write(&data, binary.LittleEndian, numbers))
	return &pb.Tensor{Dtype: dtype, Shape: []int64{int64(count)}, Data: data.Bytes()}
}

func ints(data []byte) []int32 {
	numbers := make([]int32, len(data)/4)
	check(binary.Read(bytes.NewReader(data), binary.LittleEndian, numbers))
	return numbers
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// baseModel has one that can be trained and sampled; while there is none, says what it waits for.
func (s *service) baseModel(patience time.Duration) *pb.BaseModel {
	said := false
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(time.Second) {
		var served *pb.GetServerInfoResponse
		check(s.again(func(ctx context.Context) (err error) {
			served, err = s.GetServerInfo(ctx, &pb.GetServerInfoRequest{})
			return err
		}))
		for _, model := range served.Models {
			if model.Trainable && model.Sampleable && model.Architecture != "" {
				return model
			}
		}
		if !said {
			fmt.Println("waiting for a base model with a trainer and a sampler")
			said = true
		}
	}
	log.Fatalf("no base model after %s; tinsmith status says what the cluster is doing", patience)
	return nil
}

// open has the session and model of an earlier run, or makes them. Also: the last number that was used.
func (s *service) open(file string) (state, int64) {
	var kept state
	if raw, err := os.ReadFile(file); err == nil {
		check(json.Unmarshal(raw, &kept))
		var info *pb.GetModelInfoResponse
		check(s.again(func(ctx context.Context) (err error) {
			info, err = s.GetModelInfo(ctx, &pb.GetModelInfoRequest{ModelId: kept.Model})
			return err
		}))
		fmt.Printf("going on after request %d\n", info.LastSeqId)
		return kept, info.LastSeqId
	}
	base := s.baseModel(15 * time.Minute)
	fmt.Printf("training %s\n", base.Name)
	once := fmt.Sprintf("go-%d-%d", os.Getpid(), time.Now().UnixNano())
	check(s.again(func(ctx context.Context) error {
		made, err := s.CreateSession(ctx, &pb.CreateSessionRequest{Tags: []string{"go"}, IdempotencyKey: once})
		kept.Session = made.GetSessionId()
		return err
	}))
	var created *pb.CreateModelResponse
	check(s.again(func(ctx context.Context) (err error) {
		seed := int64(1)
		lora := &pb.LoraConfig{Rank: 8, Seed: &seed, TrainAttn: true, TrainMlp: true, TrainUnembed: true}
		created, err = s.CreateModel(ctx, &pb.CreateModelRequest{
			SessionId: kept.Session, BaseModel: base.Name, Lora: lora})
		return err
	}))
	_, err := s.result(created.RequestId)
	check(err)
	kept.Model = created.ModelId
	if file != "" {
		raw, err := json.Marshal(kept)
		check(err)
		check(os.WriteFile(file, raw, 0o600))
	}
	return kept, 0
}

func main() {
	address, key := os.Getenv("TINSMITH_GRPC"), os.Getenv("TINKER_API_KEY")
	if address == "" {
		address = "127.0.0.1:8001"
	}
	if key == "" {
		log.Fatal("set TINKER_API_KEY to a key of the cluster")
	}
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	check(err)
	defer connection.Close()
	s := &service{pb.NewTinsmithServiceClient(connection), key}
	kept, seq := s.open(os.Getenv("TINSMITH_STATE"))
	go func() {
		for range time.Tick(10 * time.Second) {
			ctx, cancel := s.context(10)
			if _, err := s.Heartbeat(ctx, &pb.HeartbeatRequest{SessionId: kept.Session}); err != nil {
				log.Print(err)
			}
			cancel()
		}
	}()

	sequence := make([]int32, length)
	targets := make([]int64, length-1)
	weights := make([]float32, length-1)
	for i := range sequence {
		sequence[i] = int32((37*i + 11) % 200)
		if i > 0 {
			targets[i-1], weights[i-1] = int64(sequence[i]), 1
		}
	}
	datum := &pb.Datum{
		Tokens: tensor(pb.DataType_DATA_TYPE_INT32, length-1, sequence[:length-1]),
		LossInputs: map[string]*pb.Tensor{
			"target_tokens": tensor(pb.DataType_DATA_TYPE_INT64, length-1, targets),
			"weights":       tensor(pb.DataType_DATA_TYPE_FLOAT32, length-1, weights),
		},
	}
	batch := &pb.ForwardBackward{Data: []*pb.Datum{datum}, LossFn: "cross_entropy"}
	adam := &pb.AdamParams{LearningRate: 0.01, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8}
	// Two requests a step. A step whose second request was not sent is made whole by the first of these steps.
	for step := seq/2 + 1; step <= steps; step++ {
		var sent *pb.ForwardBackwardResponse
		seq++
		check(s.again(func(ctx context.Context) (err error) {
			sent, err = s.ForwardBackward(ctx, &pb.ForwardBackwardRequest{
				ModelId: kept.Model, SeqId: seq, ForwardBackward: batch})
			return err
		}))
		var stepped *pb.OptimStepResponse
		seq++
		check(s.again(func(ctx context.Context) (err error) {
			stepped, err = s.OptimStep(ctx, &pb.OptimStepRequest{ModelId: kept.Model, SeqId: seq, Adam: adam})
			return err
		}))
		done, err := s.result(sent.RequestId)
		check(err)
		_, err = s.result(stepped.RequestId)
		check(err)
		fmt.Printf("step %d loss %.3f\n", step, done.GetForwardBackward().Metrics["loss:sum"])
	}

	var saved *pb.SaveStateResponse
	seq++
	check(s.again(func(ctx context.Context) (err error) {
		saved, err = s.SaveState(ctx, &pb.SaveStateRequest{ModelId: kept.Model, SeqId: seq, Name: "by-heart", Overwrite: true})
		return err
	}))
	state, err := s.result(saved.RequestId)
	check(err)
	fmt.Printf("saved %s\n", state.GetSaveState().Path)

	var snapshot *pb.SaveForSamplerResponse
	seq++
	check(s.again(func(ctx context.Context) (err error) {
		snapshot, err = s.SaveForSampler(ctx, &pb.SaveForSamplerRequest{ModelId: kept.Model, SeqId: seq})
		return err
	}))
	_, err = s.result(snapshot.RequestId)
	check(err)
	s.say(snapshot.SamplingSessionId, sequence)

	if file := os.Getenv("TINSMITH_STATE"); file != "" {
		check(os.Remove(file))
	}
	check(s.again(func(ctx context.Context) error {
		_, err := s.FinishSession(ctx, &pb.FinishSessionRequest{
			SessionId: kept.Session, Reason: pb.FinishReason_FINISH_REASON_SUCCESS})
		return err
	}))
}

// say samples the rest of the sequence, and prints tokens as they come.
func (s *service) say(sampler string, sequence []int32) {
	most := int32(length - 4)
	never := &pb.StopCondition{Kind: &pb.StopCondition_Never_{Never: &pb.StopCondition_Never{}}}
	sample := &pb.SampleRequest{
		SamplingSessionId: sampler,
		Prompt:            tensor(pb.DataType_DATA_TYPE_INT32, 4, sequence[:4]),
		NumSamples:        1,
		Params:            &pb.SamplingParams{MaxTokens: &most, TopK: -1, TopP: 1, Stop: never},
	}
	var said []int32
	var sum float64
	check(s.again(func(ctx context.Context) error {
		stream, err := s.StreamSample(ctx, &pb.StreamSampleRequest{Sample: sample})
		for err == nil {
			var answer *pb.StreamSampleResponse
			if answer, err = stream.Recv(); err == nil && answer.GetNewTokens() != nil {
				// A stream that is asked for again begins anew: what is known is passed over.
				fresh := answer.GetNewTokens()
				tokens := ints(fresh.Tokens.Data)[int64(len(said))-fresh.Start:]
				said = append(said, tokens...)
				fmt.Printf("said %v\n", tokens)
				for _, bits := range ints(fresh.Logprobs.Data) {
					sum += float64(math.Float32frombits(uint32(bits)))
				}
			}
		}
		if err == io.EOF {
			return nil
		}
		return err
	}))
	right := 0
	for i, token := range said {
		if token == sequence[4+i] {
			right++
		}
	}
	fmt.Printf("said %d of %d tokens by heart, with a log-probability of %.2f\n", right, most, sum)
}
