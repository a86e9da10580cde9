{{/*
The server's configuration: `config` of the values with what the chart sets laid over it. A setting that both have is
refused, since one of the two would silently not act.
*/}}

{{- define "hps.tls" -}}
{{- $files := dict "certificate_file" "/etc/hps/tls/tls.crt" "key_file" "/etc/hps/tls/tls.key" -}}
{{- if .mtls -}}{{- $_ := set $files "client_ca_file" "/etc/hps/tls/ca.crt" -}}{{- end -}}
{{- $files | toJson -}}
{{- end -}}

{{- define "hps.config.chart" -}}
{{- $values := .Values -}}
{{- $server := dict "drain_delay_s" $values.drain.delaySeconds "drain_s" $values.drain.seconds -}}
{{- range $name, $port := dict "http" 8000 "grpc" 8001 "admin" 8002 -}}
{{- $listener := dict "host" "0.0.0.0" "port" $port -}}
{{- if $values.tls.enabled -}}
{{- $mtls := and $values.tls.mtls (ne $name "admin") -}}
{{- $_ := set $listener "tls" (include "hps.tls" (dict "mtls" $mtls) | fromJson) -}}
{{- end -}}
{{- $_ := set $server $name $listener -}}
{{- end -}}
{{- $auth := dict "mode" "off" -}}
{{- if $values.auth.enabled -}}
{{- $auth = dict "mode" "api_key" "keys_file" "/etc/hps/auth/keys.yaml" -}}
{{- end -}}
{{- $tiers := dict "rocksdb" (dict "path" "/var/lib/hps/data/rocksdb") -}}
{{- if $values.lookup.checkpoints.enabled -}}
{{- $_ := set $tiers.rocksdb "checkpoints" "/var/lib/hps/checkpoints" -}}
{{- end -}}
{{- $redis := dict -}}
{{- with include "hps.redis" . | fromJsonArray -}}{{- $_ := set $redis "addresses" . -}}{{- end -}}
{{- if $values.redis.existingSecret -}}{{- $_ := set $redis "password_file" "/etc/hps/redis/password" -}}{{- end -}}
{{- if $values.redis.tls.enabled -}}
{{- $ca := ternary (dict "ca" "/etc/hps/redis/ca.crt") (dict) (ne "" $values.redis.tls.existingSecret) -}}
{{- $_ := set $redis "tls" $ca -}}
{{- end -}}
{{- if $redis -}}{{- $_ := set $tiers "redis" $redis -}}{{- end -}}
{{- $kafka := dict -}}
{{- with include "hps.kafka" . -}}{{- $_ := set $kafka "brokers" . -}}{{- end -}}
{{- $security := $values.kafka.security -}}
{{- $options := dict -}}
{{- if ne $security.protocol "PLAINTEXT" -}}{{- $_ := set $options "security.protocol" $security.protocol -}}{{- end -}}
{{- with $security.mechanism -}}{{- $_ := set $options "sasl.mechanism" . -}}{{- end -}}
{{- if $security.caKey -}}{{- $_ := set $options "ssl.ca.location" "/etc/hps/kafka/ca.crt" -}}{{- end -}}
{{- if $security.certificateKey -}}
{{- $_ := merge $options (dict "ssl.certificate.location" "/etc/hps/kafka/tls.crt" "ssl.key.location" "/etc/hps/kafka/tls.key") -}}
{{- end -}}
{{- if hasPrefix "SASL_" $security.protocol -}}
{{- $files := dict "sasl.password" "/etc/hps/kafka/password" -}}
{{- if $security.username -}}
{{- $_ := set $options "sasl.username" $security.username -}}
{{- else -}}
{{- $_ := set $files "sasl.username" "/etc/hps/kafka/username" -}}
{{- end -}}
{{- $_ := set $kafka "options_files" $files -}}
{{- end -}}
{{- if $options -}}{{- $_ := set $kafka "options" $options -}}{{- end -}}
{{- if $values.ingest.enabled -}}{{- $_ := set $kafka "shared_writer" "ingest" -}}{{- end -}}
{{- $models := dict "repository" "/var/lib/hps/models" -}}
{{- with $values.models.uri -}}
{{- $models = dict "repository" . "download" (dict "folder" "/var/lib/hps/models") -}}
{{- end -}}
{{- $set := dict "models" $models "server" $server "auth" $auth "tiers" $tiers -}}
{{- if $kafka -}}{{- $_ := set $set "updates" (dict "kafka" $kafka) -}}{{- end -}}
{{- if eq $values.triton.mode "sidecar" -}}
{{- $port := ternary 9001 9000 (eq $values.triton.protocol "grpc") -}}
{{- $_ := set $set "dense" (dict "triton" (dict "url" (printf "localhost:%d" $port) "protocol" $values.triton.protocol)) -}}
{{- else if eq $values.triton.mode "external" -}}
{{- $_ := set $set "dense" (dict "triton" (dict "url" $values.triton.url "protocol" $values.triton.protocol)) -}}
{{- end -}}
{{- if $values.frontend.enabled -}}
{{- $nodes := dict "nodes" (list (printf "dns:///%s:8001" (include "hps.host" (dict "root" . "suffix" "-lookup")))) -}}
{{- if $values.auth.enabled -}}{{- $_ := set $nodes "api_key_file" "/etc/hps/auth/read-key" -}}{{- end -}}
{{- if $values.tls.enabled -}}
{{- $tls := dict "ca_file" "/etc/hps/tls/ca.crt" -}}
{{- if $values.tls.mtls -}}
{{- $tls = merge $tls (dict "certificate_file" "/etc/hps/tls/tls.crt" "key_file" "/etc/hps/tls/tls.key") -}}
{{- end -}}
{{- $_ := set $nodes "tls" $tls -}}
{{- end -}}
{{- $_ := set $set "lookup" $nodes -}}
{{- end -}}
{{- $set | toJson -}}
{{- end -}}

{{/* Whether the values configure update streams from Kafka. */}}
{{- define "hps.streams" -}}
{{- if or (include "hps.kafka" .) (dig "updates" "kafka" dict .Values.config) -}}yes{{- end -}}
{{- end -}}

{{/* Merges `over` into `base`, in place. With `path`, a setting that is in both is an error. */}}
{{- define "hps.overlay" -}}
{{- range $key, $value := .over -}}
{{- $there := hasKey $.base $key -}}
{{- $below := "" -}}
{{- if $.path -}}{{- $below = printf "%s.%s" $.path $key -}}{{- end -}}
{{- if and $there (kindIs "map" $value) (kindIs "map" (get $.base $key)) -}}
{{- include "hps.overlay" (dict "base" (get $.base $key) "over" $value "path" $below) -}}
{{- else if and $there $.path -}}
{{- fail (printf "%s is set by the chart from another value: remove it from config (docs/kubernetes.md, The configuration)" $below) -}}
{{- else -}}
{{- $_ := set $.base $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "hps.config" -}}
{{- $config := dict "server" (dict "log_format" "json") "tiers" (dict "cpu_cache" (dict "snapshot" (dict "path" "/var/lib/hps/data/hot-keys"))) -}}
{{- if include "hps.streams" . -}}
{{- /* Releases that share a Kafka need different groups, or they would share its partitions. */ -}}
{{- $group := printf "hps.%s.%s" .Release.Namespace (include "hps.fullname" .) -}}
{{- $_ := set $config "updates" (dict "kafka" (dict "shared_group" $group)) -}}
{{- end -}}
{{- include "hps.overlay" (dict "base" $config "over" (deepCopy .Values.config) "path" "") -}}
{{- include "hps.overlay" (dict "base" $config "over" (include "hps.config.chart" . | fromJson) "path" "config") -}}
{{- $config | toYaml -}}
{{- end -}}

{{/* Contradictory values: each message names the values and the remedy. */}}
{{- define "hps.check" -}}
{{- $values := .Values -}}
{{- $models := $values.models -}}
{{- $sources := list -}}
{{- if $models.volume -}}{{- $sources = append $sources "models.volume" -}}{{- end -}}
{{- if $models.fetch.enabled -}}{{- $sources = append $sources "models.fetch" -}}{{- end -}}
{{- if $models.demo -}}{{- $sources = append $sources "models.demo" -}}{{- end -}}
{{- if $models.uri -}}{{- $sources = append $sources "models.uri" -}}{{- end -}}
{{- if ne (len $sources) 1 -}}
{{- $found := ternary "none is" (printf "%s are" (join " and " $sources)) (empty $sources) -}}
{{- fail (printf "models: %s set; set one of models.volume (a volume with the model repository), models.uri (a remote repository), models.fetch.enabled (a container that fetches it) and models.demo=true (the demo's model, to try the chart)" $found) -}}
{{- end -}}
{{- if and $models.credentialsSecret (not $models.uri) -}}
{{- fail "models.credentialsSecret: needs models.uri, whose store takes the credentials" -}}
{{- end -}}
{{- if and $models.fetch.enabled (not $models.fetch.image) -}}
{{- fail "models.fetch.image: name the image of the container that fetches the models" -}}
{{- end -}}
{{- if and $values.tls.enabled (not $values.tls.existingSecret) -}}
{{- fail "tls.existingSecret: name the Secret with tls.crt, tls.key and ca.crt, or set tls.enabled=false" -}}
{{- end -}}
{{- if and $values.tls.mtls (not $values.tls.enabled) -}}
{{- fail "tls.mtls: needs tls.enabled=true" -}}
{{- end -}}
{{- if and $values.tls.existingSecret (not $values.tls.enabled) -}}
{{- fail "tls.existingSecret: requires tls.enabled=true; set that, or remove the Secret" -}}
{{- end -}}
{{- range $role := list "lookup" "frontend" -}}
{{- $own := index $values $role -}}
{{- $runs := or (eq $role "lookup") $values.frontend.enabled -}}
{{- if and $runs (gt (int $own.gpu.count) 0) $values.image.digest (not $values.image.gpuDigest) -}}
{{- fail (printf "image.gpuDigest: %s.gpu.count needs the image with CUDA, but image.digest is the one without; set its digest" $role) -}}
{{- end -}}
{{- end -}}
{{- if and $values.dev.redis.enabled $values.redis.addresses -}}
{{- fail "redis.addresses: dev.redis.enabled runs a Redis of the release; use one of the two" -}}
{{- end -}}
{{- if and $values.dev.kafka.enabled $values.kafka.bootstrapServers -}}
{{- fail "kafka.bootstrapServers: dev.kafka.enabled runs a Kafka of the release; use one of the two" -}}
{{- end -}}
{{- $redis := or (include "hps.redis" . | fromJsonArray) (dig "tiers" "redis" dict $values.config) -}}
{{- if and $values.redis.existingSecret (not $redis) -}}
{{- fail "redis.existingSecret: has no effect without a Redis; set redis.addresses" -}}
{{- end -}}
{{- if and $values.redis.tls.existingSecret (not $values.redis.tls.enabled) -}}
{{- fail "redis.tls.existingSecret: requires redis.tls.enabled=true; set that, or remove the Secret" -}}
{{- end -}}
{{- if and $values.redis.tls.enabled (not $redis) -}}
{{- fail "redis.tls.enabled: has no effect without a Redis; set redis.addresses" -}}
{{- end -}}
{{- $kafka := or (include "hps.kafka" .) (dig "updates" "kafka" dict $values.config) -}}
{{- if and (hasPrefix "SASL_" $values.kafka.security.protocol) (not (and $values.kafka.security.mechanism $values.kafka.security.existingSecret)) -}}
{{- fail (printf "kafka.security: protocol %s needs mechanism and existingSecret" $values.kafka.security.protocol) -}}
{{- end -}}
{{- if and $values.kafka.security.mechanism (not (hasPrefix "SASL_" $values.kafka.security.protocol)) -}}
{{- fail "kafka.security.mechanism: requires SASL; set kafka.security.protocol to SASL_SSL or SASL_PLAINTEXT" -}}
{{- end -}}
{{- with $values.kafka.security -}}
{{- if and .caKey (not (or .caSecret .existingSecret)) -}}
{{- fail "kafka.security.caKey: requires kafka.security.caSecret or existingSecret; set one of them" -}}
{{- end -}}
{{- if and .caSecret (not .caKey) -}}
{{- fail "kafka.security.caSecret: requires kafka.security.caKey; set it to the key of the roots" -}}
{{- end -}}
{{- if ne (empty .certificateKey) (empty .keyKey) -}}
{{- fail "kafka.security.certificateKey: requires kafka.security.keyKey, and vice versa; set both or neither" -}}
{{- end -}}
{{- if and .certificateKey (not .existingSecret) -}}
{{- fail "kafka.security.certificateKey: requires kafka.security.existingSecret; set that" -}}
{{- end -}}
{{- if and (or .caKey .certificateKey) (not (has .protocol (list "SSL" "SASL_SSL"))) -}}
{{- fail (printf "kafka.security.protocol: %s uses no certificates; set SSL or SASL_SSL, or remove caKey and certificateKey" .protocol) -}}
{{- end -}}
{{- end -}}
{{- if and (ne $values.kafka.security.protocol "PLAINTEXT") (not $kafka) -}}
{{- fail "kafka.security: has no effect without a Kafka; set kafka.bootstrapServers" -}}
{{- end -}}
{{- if and $values.ingest.enabled (not $values.existingConfigMap) (not (and $redis $kafka)) -}}
{{- fail "ingest.enabled: ingest writes what Kafka streams into Redis; set kafka.bootstrapServers and redis.addresses" -}}
{{- end -}}
{{- if and (eq $values.triton.mode "external") (not $values.triton.url) -}}
{{- fail "triton.url: set host:port of the external Triton, or set triton.mode=none" -}}
{{- end -}}
{{- if and $values.triton.url (ne $values.triton.mode "external") -}}
{{- fail (printf "triton.url: requires triton.mode=external, found %s" $values.triton.mode) -}}
{{- end -}}
{{- if and (eq $values.triton.mode "sidecar") (not $values.triton.modelRepository.volume) -}}
{{- fail "triton.modelRepository.volume: set the volume with the sidecar's models (hps triton export writes them)" -}}
{{- end -}}
{{- if and $values.lookup.checkpoints.enabled (not $values.lookup.checkpoints.volume) -}}
{{- fail "lookup.checkpoints.volume: set the volume for checkpoints, a claim with ReadWriteMany" -}}
{{- end -}}
{{- if and $values.service.headless (ne $values.service.type "ClusterIP") -}}
{{- fail (printf "service.headless: a %s has a cluster IP; set service.type=ClusterIP" $values.service.type) -}}
{{- end -}}
{{- if and $values.gateway.enabled (not $values.gateway.parentRefs) -}}
{{- fail "gateway.parentRefs: name the Gateway, for example [{name: public, namespace: gateways}]" -}}
{{- end -}}
{{- if and $values.gateway.enabled (not (or $values.gateway.hosts $values.gateway.grpcHosts)) -}}
{{- fail "gateway.hosts: name the hosts for HTTP, or gateway.grpcHosts those for gRPC" -}}
{{- end -}}
{{- range $host := $values.gateway.hosts -}}
{{- if has $host $values.gateway.grpcHosts -}}
{{- fail (printf "gateway.grpcHosts: %s is in gateway.hosts too, and a Gateway accepts one kind of route for a name; give gRPC a separate name" $host) -}}
{{- end -}}
{{- end -}}
{{- if and $values.existingConfigMap $values.config -}}
{{- fail "config: existingConfigMap replaces it; use one of the two" -}}
{{- end -}}
{{- if and $values.existingConfigMap $values.networkPolicy.enabled (not $values.networkPolicy.stores) -}}
{{- fail "networkPolicy.stores: list the peers of Redis, Kafka and Triton, for example [{ipBlock: {cidr: 192.0.2.0/24}}]; the chart cannot read their ports in existingConfigMap" -}}
{{- end -}}
{{- if and $values.frontend.enabled (dig "server" "workers" 0 $values.config) -}}
{{- fail "config.server.workers: front ends are single processes; give lookup nodes theirs by lookup.extraArgs={--workers,N}, and have more front ends by frontend.replicaCount" -}}
{{- end -}}
{{- range $role := list "lookup" "frontend" "ingest" -}}
{{- $own := index $values $role -}}
{{- if and $own.autoscaling.enabled $own.keda.enabled -}}
{{- fail (printf "%s.keda.enabled: KEDA creates an autoscaler; set %s.autoscaling.enabled=false" $role $role) -}}
{{- end -}}
{{- with $own.autoscaling -}}
{{- if and .enabled (not (or .targetCPU .targetMemory .podMetrics)) -}}
{{- fail (printf "%s.autoscaling: no metric is selected; set targetCPU, targetMemory or podMetrics" $role) -}}
{{- end -}}
{{- end -}}
{{- with $own.keda -}}
{{- if and .enabled (not (or .threshold .targetCPU .triggers)) -}}
{{- fail (printf "%s.keda: no trigger is selected; set threshold, targetCPU or triggers" $role) -}}
{{- end -}}
{{- if and .enabled (eq (int .minReplicas) 0) (not .triggers) -}}
{{- fail (printf "%s.keda.minReplicas: with 0 no pod would start again, since the load is measured at the pods; set 1, or triggers that do not depend on them" $role) -}}
{{- end -}}
{{- end -}}
{{- if lt (int $own.keda.maxReplicas) (int $own.keda.minReplicas) -}}
{{- fail (printf "%s.keda.maxReplicas: is %d, below minReplicas %d" $role (int $own.keda.maxReplicas) (int $own.keda.minReplicas)) -}}
{{- end -}}
{{- if lt (int $own.autoscaling.maxReplicas) (int $own.autoscaling.minReplicas) -}}
{{- fail (printf "%s.autoscaling.maxReplicas: is %d, below minReplicas %d" $role (int $own.autoscaling.maxReplicas) (int $own.autoscaling.minReplicas)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
